"""What a prompt is rendered from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kimi_k3.chat.effort import DEFAULT, Thinking


@dataclass(frozen=True)
class ImageSlot:
    """One image of the prompt: the original size in pixels, and how many pad tokens stand for it.

    `pads` is 1 where a processor expands the pad later, else the number of tokens that the vision tower gives.
    """

    width: int
    height: int
    pads: int = 1


@dataclass(frozen=True)
class ChatRequest:
    """One conversation and everything that shapes its prompt.

    `messages` are OpenAI chat messages as clients send them, `tools` the top-level declarations. `images` has one slot
    for each image part in order; None writes the placeholder text in their place (text-only use of the encoder).
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    thinking: Thinking = DEFAULT
    tool_choice: object = None
    response_format: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    images: Sequence[ImageSlot] | None = None
