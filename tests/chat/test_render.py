from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.bodies import call, read_body, result
from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.history import read_messages
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.request import ChatRequest, ImageSlot
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.tokens import IMAGE_PLACEHOLDER, K3_RANKS, SpecialTokens

# The encoder takes a placeholder that a user typed for an image; a server must not.
DEFENDED = "release_image_placeholder_in_text"


def test_every_golden(k3: K3Tokenizer, chat_cases: dict[str, dict[str, Any]]) -> None:
    assert len(chat_cases) > 150
    wrong = []
    for name, case in chat_cases.items():
        if "error" in case or name == DEFENDED:
            continue
        if render(k3, read_body(case["request"], case.get("render_options"))) != case["ids"]:
            wrong.append(name)
    assert wrong == []


def test_goldens_that_must_be_refused(k3: K3Tokenizer, chat_cases: dict[str, dict[str, Any]]) -> None:
    refused = {name: case for name, case in chat_cases.items() if "error" in case}
    assert refused
    for case in refused.values():
        with pytest.raises(RequestError):
            render(k3, read_body(case["request"], strict=True))


def test_typed_placeholder_is_text(k3: K3Tokenizer, chat_cases: dict[str, dict[str, Any]]) -> None:
    ids = render(k3, read_body(chat_cases[DEFENDED]["request"]))
    assert k3.special.media_pad not in ids
    assert IMAGE_PLACEHOLDER in k3.decode(ids)


def test_typed_placeholder_beside_a_real_image(tiny: K3Tokenizer) -> None:
    content = [{"type": "text", "text": IMAGE_PLACEHOLDER}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    request = ChatRequest([{"role": "user", "content": content}], images=[ImageSlot(640, 480, pads=3)])
    ids = render(tiny, request)
    assert ids.count(tiny.special.media_pad) == 3
    block = "<|media_begin|>image 640x480<|media_content|>" + "<|media_pad|>" * 3 + "<|media_end|>"
    assert IMAGE_PLACEHOLDER + block in tiny.decode(ids)


@pytest.mark.parametrize("slots", [0, 2])
def test_image_sizes_must_match_the_parts(tiny: K3Tokenizer, slots: int) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    request = ChatRequest([{"role": "user", "content": content}], images=[ImageSlot(1, 1)] * slots)
    with pytest.raises(RequestError, match="1 image parts"):
        render(tiny, request)


BAD = {
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]\.role: 'robot': use one of"),
    "content": ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content: 7: expected a list"),
    "part": (
        {"messages": [{"role": "user", "content": [{"type": "video_url"}]}]},
        r"messages\[0\]\.content\[0\]: .*text and image_url",
    ),
    "message": ({"messages": ["hi"]}, r"messages\[0\]: 'hi'"),
    "choice": (
        {"messages": [], "tools": [{"type": "function"}], "tool_choice": "sometimes"},
        "tool_choice: 'sometimes': use",
    ),
    "required-without-tools": ({"messages": [], "tool_choice": "required"}, "no tools to call"),
    "format": ({"messages": [], "response_format": {"type": "xml"}}, r"response_format\.type: 'xml'"),
    "schema": (
        {"messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
        r"response_format\.json_schema\.schema: \[\]: a JSON schema is an object",
    ),
    "continue-user": (
        {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
        "must be one of the assistant's",
    ),
    "continue-calls": (
        {"messages": [{"role": "assistant", "tool_calls": [call("a", "f", "")], "partial": True}]},
        "a turn with tool calls is complete",
    ),
    "tool": ({"messages": [], "tools": ["f"]}, r"tools\[0\]: 'f'"),
}


@pytest.mark.parametrize(("body", "message"), BAD.values(), ids=BAD)
def test_bad_requests_say_what_and_where(tiny: K3Tokenizer, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render(tiny, read_body(body))


def test_partial_in_the_middle_is_an_ordinary_turn(tiny: K3Tokenizer) -> None:
    turns = [{"role": "assistant", "content": "a", "partial": True}, {"role": "user", "content": "b"}]
    plain = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert render(tiny, ChatRequest(turns)) == render(tiny, ChatRequest(plain))


def test_thinking_off_drops_every_think_element(tiny: K3Tokenizer) -> None:
    messages = [{"role": "assistant", "content": "a", "reasoning": "secret"}, {"role": "user", "content": "b"}]
    text = tiny.decode(render(tiny, read_body({"messages": messages, "reasoning_effort": "none"})))
    assert "think" not in text and "secret" not in text
    assert text.endswith('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>')


SPELLINGS = [*SpecialTokens.from_ranks(K3_RANKS).ids, IMAGE_PLACEHOLDER]
texts = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=8)), max_size=5).map("".join)
arguments = st.one_of(
    texts, st.none(), st.dictionaries(texts, st.one_of(texts, st.integers(), st.lists(texts, max_size=2)), max_size=2)
)
names = texts.filter(bool)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from(["system", "user", "assistant", "tools"]))
        message: dict[str, Any] = {"role": role, "content": draw(texts), "name": draw(texts)}
        if role == "tools":
            message = {"role": "system", "tools": [{"type": "function", "function": {"name": draw(names)}}]}
        if role == "assistant":
            message["reasoning"] = draw(texts)
            calls = [call(f"c{k}", draw(names), draw(arguments)) for k in range(draw(st.integers(0, 2)))]
            message["tool_calls"] = calls
            messages.append(message)
            messages += [result(made["id"], draw(texts)) for made in draw(st.permutations(calls))]
            continue
        messages.append(message)
    return messages


def special_count(messages: list[dict[str, Any]], thinking: bool) -> int:
    """How many control tokens the template puts around these messages."""

    def element(children: int = 0) -> int:
        return 4 + children

    total = 0
    for message in read_messages(messages):
        total += 5
        if message.role == "assistant":
            total += element() * (2 if thinking else 1)
            if message.calls:
                inner = sum(
                    element(element() * (1 if isinstance(made.arguments, str) else len(made.arguments)))
                    for made in message.calls
                )
                total += element(inner)
    return total


@settings(max_examples=60, deadline=None)
@given(messages=conversations(), thinking=st.booleans())
def test_no_special_token_but_the_templates(tiny: K3Tokenizer, messages: list[dict[str, Any]], thinking: bool) -> None:
    body: dict[str, Any] = {"messages": messages}
    if not thinking:
        body["reasoning_effort"] = "none"
    ids = render(tiny, read_body(body))
    found = [token_id for token_id in ids if token_id in tiny.special]
    effort_message, opener = 5, 4
    assert len(found) == special_count(messages, thinking) + opener + (effort_message if thinking else 0)
    assert set(found) <= {tiny.special.open, tiny.special.close, tiny.special.sep, tiny.special.end_of_msg}


@settings(max_examples=60, deadline=None)
@given(messages=conversations(), added=texts)
def test_an_appended_message_changes_nothing_before_it(
    tiny: K3Tokenizer, messages: list[dict[str, Any]], added: str
) -> None:
    closed = ChatRequest(messages, add_generation_prompt=False)
    longer = ChatRequest([*messages, {"role": "user", "content": added}], add_generation_prompt=False)
    before = render(tiny, closed)
    assert render(tiny, longer)[: len(before)] == before
