"""OpenAI request bodies as render requests, and bodies to try."""

import re
from collections.abc import Mapping
from typing import Any

from vllm_kimi_k3.chat.effort import resolve
from vllm_kimi_k3.chat.request import ChatRequest, ImageSlot


def read_body(body: Mapping[str, Any], options: Mapping[str, Any] | None = None, strict: bool = False) -> ChatRequest:
    """A chat completions body; `options` are the `render_options` of a golden."""
    options = options or {}
    images = None
    if "image_prompts" in options:
        sizes = [re.search(r"image (\d+)x(\d+)", prompt) for prompt in options["image_prompts"]]
        images = [ImageSlot(int(size[1]), int(size[2])) for size in sizes if size]
    return ChatRequest(
        messages=body["messages"],
        tools=body.get("tools") or (),
        thinking=resolve(
            body.get("reasoning_effort"), body.get("thinking"), body.get("chat_template_kwargs"), strict=strict
        ),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        add_generation_prompt=options.get("add_generation_prompt", True),
        continue_final_message=body.get("continue_final_message", False),
        images=images,
    )


def call(call_id: str, name: str, arguments: object) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str | None, content: object, **more: object) -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "content": content, **({} if call_id is None else {"tool_call_id": call_id}), **more}
