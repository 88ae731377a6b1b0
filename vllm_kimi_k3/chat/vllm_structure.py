"""Which grammar a vLLM request gets: from tool_choice, strict tools and response_format."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vllm import envs
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import structured_outputs_to_format
from vllm.sampling_params import StructuredOutputsParams

from vllm_kimi_k3.chat.structure import Format, Grammar, Tool, grammar_vocabulary, json_value
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.tokens import SpecialTokens

# A field that xgrammar ignores; it tells a tag that this module made from one that a client sent.
_MARK = "vllm_kimi_k3"


def grammar_compiler(k3: K3Tokenizer, size: int) -> Any:
    """xgrammar's compiler for K3's vocabulary; `size` is the number of logits."""
    import xgrammar

    info = xgrammar.TokenizerInfo(
        grammar_vocabulary(k3.special, k3.token_bytes, size),
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=size,
        stop_token_ids=[k3.special.end_of_msg],
    )
    cache = envs.VLLM_XGRAMMAR_CACHE_MB << 20
    return xgrammar.GrammarCompiler(info, max_threads=8, cache_enabled=True, cache_limit_bytes=cache)


def request_tools(tools: Iterable[Any] | None, all_strict: bool) -> list[Tool]:
    """The function tools of a Chat or Responses request."""
    found = []
    for tool in tools or ():
        fields = tool if isinstance(tool, Mapping) else tool.model_dump()
        inner = fields.get("function")
        function: Mapping[str, Any] = inner if isinstance(inner, Mapping) else fields
        if fields.get("type") in ("function", "custom", None) and function.get("name"):
            strict = all_strict or function.get("strict") is True
            found.append(Tool(function["name"], function.get("parameters"), strict))
    return found


def chosen(choice: Any, tools: list[Tool]) -> tuple[str, list[Tool]]:
    """tool_choice as `auto`, `none`, `required` or `named`, and the tools that it leaves.

    Raises VLLMValidationError, a 400, where it names a tool that the request does not declare.
    """
    if choice is None or isinstance(choice, str):
        return choice or "auto", tools
    fields = choice.model_dump() if hasattr(choice, "model_dump") else dict(choice)
    if fields.get("type") == "allowed_tools":
        allowed = fields.get("allowed_tools", fields)
        names = {_name(reference) for reference in allowed.get("tools") or ()}
        return allowed.get("mode", "auto"), [tool for tool in tools if tool.name in names]
    name = _name(fields)
    named = [tool for tool in tools if tool.name == name]
    if not named:
        raise VLLMValidationError(
            f"tool_choice names the tool {name!r}, which is not among the request's tools: "
            f"{sorted(tool.name for tool in tools)}",
            parameter="tool_choice",
            value=name,
        )
    return "named", named


def _name(fields: Mapping[str, Any]) -> Any:
    function = fields.get("function")
    return function.get("name") if isinstance(function, Mapping) else fields.get("name")


def content_format(structured: StructuredOutputsParams | None) -> Format | None:
    """The form that the answer must have, None if any."""
    if structured is None:
        return None
    if structured.json_object:
        return json_value({"type": "object"})
    if structured.json is not None:
        schema = json.loads(structured.json) if isinstance(structured.json, str) else structured.json
        return json_value(schema)
    other = structured_outputs_to_format(structured)
    return None if other is None else other.model_dump()


def constrain(
    request: Any, specials: SpecialTokens, thinking: bool, calls: bool, constrain_auto: bool, all_strict: bool
) -> None:
    """Put the structural tag into `request` that its tool_choice, tools and response_format ask for, if any.

    Args:
        thinking: whether generation starts inside think.
        calls: whether the server parses tool calls.
        constrain_auto: hold calls to the declared tools also with `auto`, where no tool is strict.
        all_strict: treat every tool as strict.
    """
    structured = request.extract_structured_outputs()
    if structured is not None and structured.structural_tag and _MARK in json.loads(structured.structural_tag):
        return
    content = content_format(structured)
    mode, tools = chosen(request.tool_choice, request_tools(request.tools, all_strict) if calls else [])
    single = request.parallel_tool_calls is False
    grammar = Grammar(specials, thinking)
    form: Format | None = None
    if mode == "named":
        form = grammar.calls(tools, single=True)
    elif tools and mode == "required":
        form = grammar.calls(tools, single)
    elif tools and mode == "auto":
        if content is not None or single or constrain_auto or any(tool.strict for tool in tools):
            form = grammar.auto(tools, single, content)
    elif content is not None or (tools and mode == "none"):
        form = grammar.answer(content)
    if form is None:
        return
    tag = {"type": "structural_tag", "format": form, _MARK: True}
    request.structured_outputs = StructuredOutputsParams(structural_tag=json.dumps(tag))
    if hasattr(request, "response_format"):
        request.response_format = None
    else:
        request.text = None
