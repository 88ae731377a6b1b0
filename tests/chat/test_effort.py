from typing import Any

import pytest

from vllm_kimi_k3.chat.effort import EFFORTS, NO_MESSAGE, Thinking, resolve
from vllm_kimi_k3.chat.errors import RequestError

OFF = Thinking(False, None)

CASES: dict[str, tuple[dict[str, Any], Thinking]] = {
    "default": ({}, Thinking(True, "max")),
    "none": ({"reasoning_effort": "none"}, OFF),
    "minimal": ({"reasoning_effort": "minimal"}, Thinking(True, "low")),
    "low": ({"reasoning_effort": "low"}, Thinking(True, "low")),
    "medium": ({"reasoning_effort": "medium"}, Thinking(True, "high")),
    "high": ({"reasoning_effort": "high"}, Thinking(True, "high")),
    "xhigh": ({"reasoning_effort": "xhigh"}, Thinking(True, "max")),
    "max": ({"reasoning_effort": "max"}, Thinking(True, "max")),
    "object-disabled": ({"thinking": {"type": "disabled"}}, OFF),
    "object-effort": ({"thinking": {"type": "enabled", "keep": "all", "effort": "low"}}, Thinking(True, "low")),
    "object-effort-none": ({"thinking": {"effort": "none"}}, OFF),
    "disabled-beats-effort": ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, OFF),
    "enabled-beats-none": ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, Thinking(True, "max")),
    "effort-beats-object": ({"thinking": {"effort": "high"}, "reasoning_effort": "low"}, Thinking(True, "low")),
    "adaptive": ({"thinking": {"type": "adaptive"}}, Thinking(True, "max")),
    "adaptive-with-effort": ({"thinking": {"type": "adaptive"}, "reasoning_effort": "low"}, Thinking(True, "low")),
    "budget-small": ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Thinking(True, "low")),
    "budget-middle": ({"thinking": {"type": "enabled", "budget_tokens": 10_000}}, Thinking(True, "high")),
    "budget-large": ({"thinking": {"type": "enabled", "budget_tokens": 64_000}}, Thinking(True, "max")),
    "kwargs-off": ({"reasoning_effort": "high", "kwargs": {"thinking": False}}, OFF),
    "kwargs-on": ({"reasoning_effort": "none", "kwargs": {"thinking": True}}, Thinking(True, "max")),
    "enable-thinking": ({"kwargs": {"enable_thinking": False}}, OFF),
    "thinking-beats-enable": ({"kwargs": {"enable_thinking": False, "thinking": True}}, Thinking(True, "max")),
    "kwargs-effort": ({"reasoning_effort": "low", "kwargs": {"thinking_effort": "high"}}, Thinking(True, "high")),
    "kwargs-null": ({"kwargs": {"thinking_effort": None}}, Thinking(True, None)),
    "kwargs-null-carried": ({"kwargs": {"thinking_effort": NO_MESSAGE}}, Thinking(True, None)),
    "effort-without-thinking": ({"kwargs": {"thinking": False, "thinking_effort": "low"}}, OFF),
}


@pytest.mark.parametrize(("request_", "expected"), CASES.values(), ids=CASES)
def test_table(request_: dict[str, Any], expected: Thinking) -> None:
    assert resolve(**request_) == expected


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"reasoning_effort": "ultra"}, f"reasoning_effort: 'ultra': use one of {', '.join(EFFORTS)}"),
        ({"reasoning_effort": 3}, "reasoning_effort: 3"),
        ({"reasoning_effort": "medium", "strict": True}, "use one of none, low, high, max"),
        ({"thinking": {"type": "maybe"}}, "thinking.type: 'maybe': use one of enabled, adaptive, disabled"),
        ({"thinking": "on"}, "thinking: 'on': use an object"),
        ({"thinking": {"budget_tokens": -1}}, "thinking.budget_tokens: -1"),
        ({"kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking: 'yes': use true or false"),
        ({"kwargs": {"thinking_effort": "huge"}}, "chat_template_kwargs.thinking_effort: 'huge'"),
    ],
)
def test_unknown_names_are_refused(request_: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(**request_)
    assert str(caught.value).startswith(message) or message in str(caught.value)
