"""Request fields that vLLM does not carry to a renderer, carried in the template arguments that it does carry.

`compat` calls these from the places where vLLM builds a renderer's parameters.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import VLLMValidationError

from vllm_kimi_k3.chat import scope
from vllm_kimi_k3.chat.effort import NO_MESSAGE, resolve
from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.settings import settings

_SAYS_THINKING = ("thinking", "enable_thinking", "thinking_effort")


def carry_fields(request: Any, params: Any) -> Any:
    """The chat parameters of a request, with its thinking resolved and its response format filled in.

    Where the request says anything about thinking, the template arguments end up with `thinking` and `thinking_effort`
    alone, so the renderer and the parser read the same answer; where it says nothing, the server's defaults hold.

    Args:
        request: vLLM's Chat Completions or Responses request.
        params: the `ChatParams` that vLLM built for it.

    Raises:
        VLLMValidationError: an effort or a thinking object that has no meaning.
    """
    kwargs = dict(params.chat_template_kwargs)
    given = getattr(request, "chat_template_kwargs", None) or {}
    extra = request.model_extra or {}
    effort = kwargs.get("reasoning_effort", extra.get("reasoning_effort"))
    thinking = extra.get("thinking")
    if effort is not None or thinking is not None or any(key in given for key in _SAYS_THINKING):
        try:
            resolved = resolve(effort, thinking, given, strict=settings().strict_effort)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=error.field) from error
        kwargs = {key: value for key, value in kwargs.items() if key not in ("enable_thinking", "reasoning_effort")}
        kwargs["thinking"] = resolved.enabled
        # vLLM drops nulls when it merges the server's defaults in.
        kwargs["thinking_effort"] = resolved.effort or NO_MESSAGE
    response_format = params.response_format
    if response_format is None:
        response_format = _responses_format(getattr(request, "text", None))
    return dataclasses.replace(params, chat_template_kwargs=kwargs, response_format=response_format)


def _responses_format(text: Any) -> Mapping[str, Any] | None:
    """`text.format` of a Responses request as a chat response format."""
    form: Any = getattr(text, "format", None)
    kind = getattr(form, "type", None)
    if kind == "json_object":
        return {"type": kind}
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": form.schema_}}
    return None


def moonshot_count(make_usage: Any, prompt_field: str) -> Any:
    """A maker of usage objects that leaves out the tokens that Moonshot's service does not count."""

    def make(**fields: Any) -> Any:
        request = scope.current.get()
        uncounted = 0 if request is None else request.uncounted
        fields[prompt_field] -= uncounted
        fields["total_tokens"] -= uncounted
        return make_usage(**fields)

    return make


def anthropic_thinking(anthropic: Any, chat: Any) -> Any:
    """The chat request that vLLM made of an Anthropic one, with the `thinking` object that it leaves out."""
    thinking = getattr(anthropic, "thinking", None)
    if thinking is not None:
        # An extra field, as a Chat Completions client would send it; `carry_fields` reads it.
        chat.thinking = {"type": thinking.type}
        if getattr(thinking, "budget_tokens", None) is not None:
            chat.thinking["budget_tokens"] = thinking.budget_tokens
    return chat


def anthropic_tool_call(block: Any) -> dict[str, Any]:
    """A past `tool_use` block as a chat tool call, its input spelled as K3 writes it: non-ASCII text as it is."""
    return {
        "id": block.id or "",
        "type": "function",
        "function": {"name": block.name or "", "arguments": json.dumps(block.input or {}, ensure_ascii=False)},
    }
