"""The renderer in vLLM's terms: the renderer mode `kimi_k3`.

vLLM's own reading of chat messages drops what K3 needs (tools of a system message, names of results, borders of content
parts, the spelling of arguments), so messages are read here, and their images are fetched by `images`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import BaseRenderer
from vllm.renderers.chat_utils import ChatCompletionMessageParam, ConversationMessage
from vllm.renderers.inputs import DictPrompt
from vllm.renderers.inputs.preprocess import parse_dec_only_prompt
from vllm.renderers.params import ChatParams
from vllm.utils.async_utils import make_async

from vllm_kimi_k3.chat import scope
from vllm_kimi_k3.chat.effort import resolve
from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.history import IMAGE_PARTS, read_messages
from vllm_kimi_k3.chat.render import render_messages
from vllm_kimi_k3.chat.request import ChatRequest, ImageSlot
from vllm_kimi_k3.chat.scope import RequestScope
from vllm_kimi_k3.chat.thinking import ThinkingStore, conversation_of
from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer
from vllm_kimi_k3.compat.server import patch_chat_server
from vllm_kimi_k3.images.vllm_media import ImageSource
from vllm_kimi_k3.settings import settings

# `<|open|>think<|sep|>` or `<|open|>response<|sep|>`
_OPENER_TOKENS = 3


@cache
def store() -> ThinkingStore | None:
    """The thinking that this process remembers; None where the setting is off."""
    megabytes = settings().thinking_store_mb
    return ThinkingStore(megabytes << 20) if megabytes > 0 else None


class KimiK3Renderer(BaseRenderer[KimiK3Tokenizer]):
    """Renders chat messages into token ids, with the thinking that a client dropped put back."""

    def __init__(self, config: VllmConfig, tokenizer: KimiK3Tokenizer | None) -> None:
        super().__init__(config, tokenizer)
        self._render_async = make_async(self._render, executor=self._executor)
        patch_chat_server()
        # None where the checkpoint has no tower or images are switched off.
        self._source: ImageSource | None = None
        if self.mm_processor is not None:
            self._source = ImageSource(self.model_config, self.mm_processor.info.rules)

    def render_messages(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """The conversation as given, and its prompt. Raises VLLMValidationError for what K3's format cannot hold."""
        plain = plain_messages(messages)
        parts = image_parts(plain)
        images = self._images(parts).fetch(parts) if parts else None
        return self._finish(plain, self._render(plain, params, images, scope.current.get()), images)

    async def render_messages_async(
        self, messages: list[ChatCompletionMessageParam], params: ChatParams
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        """Like `render_messages`; images are fetched together, rendering runs in the renderer's threads."""
        plain = plain_messages(messages)
        parts = image_parts(plain)
        images = await self._images(parts).fetch_async(parts) if parts else None
        ids = await self._render_async(plain, params, images, scope.current.get())
        return self._finish(plain, ids, images)

    def _render(
        self,
        messages: list[dict[str, Any]],
        params: ChatParams,
        images: Sequence[Any] | None,
        request_scope: RequestScope | None,
    ) -> list[int]:
        try:
            # One pad each: the image processor expands it.
            slots = None if images is None else [ImageSlot(*image.size) for image in images]
            request = chat_request(messages, params, slots)
            read = read_messages(messages)
            continued = request.continue_final_message or bool(read and read[-1].partial)
            if request_scope is not None:
                request_scope.uncounted = _OPENER_TOKENS if request.add_generation_prompt and not continued else 0
            remembered = store()
            if remembered is not None and request_scope is not None and request.thinking.enabled:
                request_scope.rendered(None if continued else conversation_of(request_scope.tenant, read))
                read = remembered.restore(request_scope.tenant, read)
            return render_messages(self.get_tokenizer().k3, request, read)
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=error.field) from error

    def _images(self, parts: Sequence[Mapping[str, Any]]) -> ImageSource:
        """Where a request's images come from; raises VLLMValidationError where there may not be so many."""
        if self._source is None:
            raise VLLMValidationError(
                f"the request has {len(parts)} images: this server takes none; its checkpoint has no vision tower, or "
                "images are switched off (--language-model-only, --limit-mm-per-prompt). Send text only",
                parameter="messages",
            )
        self.get_mm_processor().info.validate_num_items("image", len(parts))
        return self._source

    def _finish(
        self, messages: list[dict[str, Any]], ids: list[int], images: Sequence[Any] | None
    ) -> tuple[list[ConversationMessage], DictPrompt]:
        prompt = parse_dec_only_prompt(ids)
        if images is not None:
            prompt["multi_modal_data"] = {"image": images}
        return cast(list[ConversationMessage], messages), prompt


def plain_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Messages as dicts of plain lists and dicts.

    vLLM's request model leaves one-shot iterators and model objects in them; lists take their place, in the message
    itself too, since others read it after us.
    """
    plain = []
    for message in messages:
        made = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
        content = made.get("content")
        if content is not None and not isinstance(content, str):
            made["content"] = [_plain(part) for part in content]
        plain.append(made)
    return plain


def _plain(part: Any) -> Any:
    return part.model_dump(exclude_none=True) if hasattr(part, "model_dump") else part


def image_parts(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The image parts of all messages in order."""
    return [
        dict(part)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
    ]


def chat_request(
    messages: Sequence[Mapping[str, Any]], params: ChatParams, images: Sequence[ImageSlot] | None
) -> ChatRequest:
    """A render request from what vLLM hands to a renderer.

    Raises RequestError where there are no messages: the format has words for that, but it is a client's mistake.
    """
    if not messages:
        raise RequestError("messages", messages, "there is nothing to answer; send at least one message")
    kwargs = dict(params.chat_template_kwargs)
    effort = kwargs.pop("reasoning_effort", None)
    return ChatRequest(
        messages=messages,
        tools=kwargs.get("tools") or (),
        thinking=resolve(effort, kwargs=kwargs, strict=settings().strict_effort),
        tool_choice=_plain(params.tool_choice),
        response_format=response_format_of(params.response_format),
        add_generation_prompt=kwargs.get("add_generation_prompt", True),
        continue_final_message=kwargs.get("continue_final_message", False),
        images=images,
    )


def response_format_of(given: Any) -> dict[str, Any] | None:
    """A response format as a plain dict; None for those that K3's prompt has no words for."""
    kind = given.get("type") if isinstance(given, Mapping) else getattr(given, "type", None)
    if kind not in ("json_object", "json_schema"):
        return None
    if isinstance(given, Mapping):
        return dict(given)
    # Not dumped whole: a dump without nulls would drop those that are part of the schema.
    schema = getattr(given.json_schema, "json_schema", None) if kind == "json_schema" else None
    return {"type": kind, "json_schema": {"schema": schema}}
