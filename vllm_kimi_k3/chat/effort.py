"""Thinking on or off, and how much of it: every spelling that clients use, mapped to K3's three efforts.

| sent              | thinking | effort in the prompt |
|-------------------|----------|----------------------|
| none              | off      |                      |
| minimal, low      | on       | low                  |
| medium, high      | on       | high                 |
| xhigh, max        | on       | max                  |
| nothing           | on       | max                  |

Who wins: `chat_template_kwargs` over everything, then for on/off the `thinking` object over `reasoning_effort`, and for
the effort `reasoning_effort` over the `thinking` object. `chat_template_kwargs.thinking_effort: null` writes no effort
message. In the `thinking` object, `effort` is a name of the table and `budget_tokens` (Anthropic) counts as `low` up to
4,096, `high` up to 16,384 and `max` above; `adaptive` is on and leaves the effort to the rest of the request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_kimi_k3.chat.errors import RequestError

#: name a client may send -> K3's effort; None is thinking off
EFFORTS: dict[str, str | None] = {
    "none": None,
    "minimal": "low",
    "low": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
#: The names that Moonshot's own encoder takes; with `strict` nothing else passes.
OWN_NAMES = ("none", "low", "high", "max")

#: Stands for `thinking_effort: null` where a null would be dropped on the way.
NO_MESSAGE = "null"

_LOW_BUDGET = 4096
_HIGH_BUDGET = 16_384


@dataclass(frozen=True)
class Thinking:
    """Whether the model thinks, and the effort that the prompt names (None: the prompt names none)."""

    enabled: bool = True
    effort: str | None = "max"


DEFAULT = Thinking()


def resolve(
    reasoning_effort: object = None,
    thinking: object = None,
    kwargs: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Thinking:
    """What a request asks for.

    Args:
        reasoning_effort: OpenAI's field, also Anthropic's `output_config.effort`.
        thinking: a bool, or the object `{"type": …, "effort": …, "budget_tokens": …}`.
        kwargs: `chat_template_kwargs`: `thinking` or `enable_thinking`, and `thinking_effort`.
        strict: take only the names that Moonshot's encoder takes.

    Raises:
        RequestError: an unknown name (the text lists the known ones) or a value of the wrong type.
    """
    kwargs = kwargs or {}
    switch, effort = _read_object(thinking, strict)
    if reasoning_effort is not None:
        named = _lookup("reasoning_effort", reasoning_effort, strict)
        if named is not None:
            effort = named
        elif switch is None:
            switch = False
    for key in ("enable_thinking", "thinking"):
        if kwargs.get(key) is not None:
            switch = _flag(f"chat_template_kwargs.{key}", kwargs[key])
    if "thinking_effort" in kwargs:
        value = kwargs["thinking_effort"]
        if value is None or value == NO_MESSAGE:
            return Thinking(switch is not False, None)
        effort = _lookup("chat_template_kwargs.thinking_effort", value, strict)
        if effort is None and switch is None:
            switch = False
    if switch is False:
        return Thinking(False, None)
    return Thinking(True, effort or DEFAULT.effort)


def _lookup(field: str, value: object, strict: bool) -> str | None:
    known = OWN_NAMES if strict else tuple(EFFORTS)
    if not isinstance(value, str) or value not in known:
        raise RequestError(field, value, f"use one of {', '.join(known)}")
    return EFFORTS[value]


def _flag(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(field, value, "use true or false")
    return value


def _read_object(thinking: object, strict: bool) -> tuple[bool | None, str | None]:
    """Switch and effort of the `thinking` object; None where it says nothing."""
    if thinking is None:
        return None, None
    if isinstance(thinking, bool):
        return thinking, None
    kinds = {"enabled": True, "adaptive": True, "disabled": False}
    if not isinstance(thinking, Mapping):
        raise RequestError("thinking", thinking, 'use an object such as {"type": "enabled"}')
    kind = thinking.get("type", "enabled")
    if kind not in kinds:
        raise RequestError("thinking.type", kind, f"use one of {', '.join(kinds)}")
    switch = kinds[kind]
    effort = None
    if thinking.get("effort") is not None:
        effort = _lookup("thinking.effort", thinking["effort"], strict)
        switch = switch and effort is not None
    elif thinking.get("budget_tokens") is not None:
        effort = budget_effort(thinking["budget_tokens"])
    return switch, effort


def budget_effort(budget: object) -> str:
    """Effort for a budget of thinking tokens."""
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise RequestError("thinking.budget_tokens", budget, "use a whole number of tokens")
    return "low" if budget <= _LOW_BUDGET else "high" if budget <= _HIGH_BUDGET else "max"
