"""The parsers as vLLM calls them."""

import json
from types import SimpleNamespace

import pytest
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.parser_manager import ParserManager

from tests.chat.shapes import SHAPES, Shape, argument, call, tools
from tests.chat.vocabulary import RANKS, SPECIALS, spell, text_ids
from vllm_kimi_k3 import register
from vllm_kimi_k3.chat.events import Arguments, CallEnd, CallStart, Content, End, Reasoning
from vllm_kimi_k3.chat.parser import Mode
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.vllm_messages import as_anthropic_calls, delta_message, pieces_of
from vllm_kimi_k3.chat.vllm_parsers import KimiK3Parser, KimiK3ReasoningParser, KimiK3ToolParser
from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer

TOKENIZER = KimiK3Tokenizer(K3Tokenizer(RANKS, SPECIALS))
WEATHER = {"type": "object", "properties": {"days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
PROMPT = spell('<O>message role="user"<S>Hi<C>message<S><E><O>message role="assistant"<S><O>think<S>')


@pytest.fixture(scope="module")
def unified() -> type[KimiK3Parser]:
    register()
    parser = ParserManager.get_parser("kimi_k3", "kimi_k3", enable_auto_tools=True, tokenizer=TOKENIZER)
    assert parser is not None and issubclass(parser, KimiK3Parser)
    return parser


def request(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="k3", messages=[{"role": "user", "content": "Hi"}], **fields)


def make(unified: type[KimiK3Parser], chat: ChatCompletionRequest, thinking: bool = True) -> KimiK3Parser:
    return unified(TOKENIZER, chat.tools, chat_template_kwargs={"thinking": thinking})


def collect(parser: KimiK3Parser, ids: list[int], chat: ChatCompletionRequest, size: int, prompt=None, text=""):
    """Everything that a client gets from a stream, and the deltas themselves."""
    reasoning, content, calls, deltas = "", "", {}, []
    for at in range(0, len(ids), size):
        last = at + size >= len(ids)
        delta = parser.parse_delta(text, ids[at : at + size], chat, prompt, finished=last)
        if delta is None:
            continue
        deltas.append(delta)
        reasoning += delta.reasoning or ""
        content += delta.content or ""
        for part in delta.tool_calls:
            made = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            assert part.id in (None, made["id"]) and part.function.name in (None, made["name"])
            made["arguments"] += part.function.arguments or ""
    return reasoning, content, [(c["name"], c["arguments"]) for c in calls.values()], deltas


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_stream_and_whole_give_the_shape(unified, shape: Shape):
    chat = request(tools=TOOLS)
    ids = spell(shape.output)
    expected = (shape.reasoning, shape.content, shape.calls)
    thinking = shape.start is Mode.THINK
    for size in (1, 3, 8):
        assert collect(make(unified, chat, thinking), ids, chat, size)[:3] == expected
    reasoning, content, calls = make(unified, chat, thinking).parse("", chat, True, ids)
    assert (reasoning or "", content or "", [(c.name, c.arguments) for c in calls or []]) == expected


def test_deltas_carry_only_what_they_bring(unified):
    chat = request(tools=TOOLS)
    ids = spell(
        f"hm<C>think<S><O>response<S>Hi<C>response<S>{tools(call('weather', argument('days', 'number', '2')))}<E>"
    )
    *_, deltas = collect(make(unified, chat), ids, chat, 1)
    assert [delta.model_dump(exclude_unset=True) for delta in deltas[:2]] == [{"reasoning": "h"}, {"reasoning": "m"}]
    starts = [part for delta in deltas for part in delta.tool_calls if part.id]
    assert [part.model_dump() for part in starts] == [
        {"id": starts[0].id, "type": "function", "index": 0, "function": {"name": "weather", "arguments": ""}}
    ]


def test_deltas_equal_validated_ones():
    function = DeltaFunctionCall(name="f", arguments='{"a"')
    first = DeltaToolCall(index=0, id="c", type="function", function=function)
    more = DeltaToolCall(index=1, function=DeltaFunctionCall(arguments="}"))
    events = [
        Reasoning("r"),
        Content("a"),
        Content("b"),
        CallStart(0, "c", "f"),
        Arguments(0, '{"a"'),
        Arguments(1, "}"),
    ]
    for part, expected in [
        (events, DeltaMessage(reasoning="r", content="ab", tool_calls=[first, more])),
        (events[:1], DeltaMessage(reasoning="r")),
        (events[-1:], DeltaMessage(tool_calls=[more])),
    ]:
        made = delta_message(part)
        assert made == expected and made.model_fields_set == expected.model_fields_set
        assert made.model_dump_json(exclude_unset=True) == expected.model_dump_json(exclude_unset=True)
        assert made.model_copy(update={"role": "assistant"}).role == "assistant"
    assert delta_message([CallEnd(0), End(False)]) is None


def test_schemas_of_the_request_decide(unified):
    chat = request(tools=TOOLS)
    ids = spell(f"<C>think<S>{tools(call('weather', argument('days', 'string', '2')))}<E>")
    assert make(unified, chat).parse("", chat, True, ids)[2][0].arguments == '{"days": 2}'


def test_schemas_declared_in_messages_decide(unified):
    chat = request(tools=TOOLS)
    chat.messages = [
        {"role": "system", "tools": [{"type": "function", "function": {"name": "late", "parameters": WEATHER}}]}
    ]
    ids = spell(f"<C>think<S>{tools(call('late', argument('days', 'string', '2')))}<E>")
    assert make(unified, chat).parse("", chat, True, ids)[2][0].arguments == '{"days": 2}'


def test_prompt_tells_where_the_output_starts(unified):
    chat = request()
    ids = spell("hm<C>think<S>Hi<E>")
    assert collect(make(unified, chat, thinking=False), ids, chat, 1, PROMPT)[:2] == ("hm", "Hi")
    parser = make(unified, chat, thinking=False)
    parser.set_prompt_token_ids(PROMPT)
    assert parser.parse("", chat, True, ids)[:2] == ("hm", "Hi")
    assert not parser.is_reasoning_end(PROMPT)
    assert parser.is_reasoning_end([*PROMPT, *spell("hm<O>tools<S>")])


def test_tool_choice_none_drops_calls_and_keeps_content(unified):
    chat = request(tools=TOOLS, tool_choice="none")
    ids = spell(f"<C>think<S><O>response<S>Hi<C>response<S>{tools(call('weather'))}<E>")
    assert make(unified, chat).parse("", chat, True, ids) == (None, "Hi", None)
    assert collect(make(unified, chat), ids, chat, 2)[1:3] == ("Hi", [])


def test_reasoning_can_be_hidden(unified):
    chat = request(include_reasoning=False)
    ids = spell("42<C>response<S><E>")
    assert collect(make(unified, chat), ids, chat, 1)[:2] == ("", "42")


@pytest.mark.parametrize("size", [1, 5, 500])
def test_text_alone_is_parsed(unified, size: int):
    chat = request(tools=TOOLS)
    text = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="t" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    )
    reasoning, content, calls = make(unified, chat).parse(text, chat, True)
    assert (reasoning, content, [(c.name, c.arguments) for c in calls or []]) == ("hm", "Hi", [("t", "{}")])
    parser, got = make(unified, chat), ""
    for at in range(0, len(text), size):
        delta = parser.parse_delta(text[at : at + size], [], chat, PROMPT, finished=at + size >= len(text))
        got += (delta and delta.content) or ""
    assert got == "Hi"


def test_reasoning_tokens(unified):
    chat = request()
    thought = text_ids("some thought")
    ids = [*thought, *spell("<C>think<S><O>response<S>Hi<E>")]
    parser = make(unified, chat)
    parser.parse("", chat, True, ids)
    assert parser.count_reasoning_tokens(ids) == len(thought)
    assert make(unified, chat).count_reasoning_tokens(ids) == len(thought)
    assert KimiK3ReasoningParser(TOKENIZER).count_reasoning_tokens(ids) == len(thought)


HEAD = "<|close|>think<|sep|><|open|>response<|sep|>"
STOPPED = [
    ("inside the answer", "one two three", "one t", "one t"),
    ("at a token", "one two", "one", "one"),
    ("nothing", "one<C>message<S><E>", "one<|close|>message<|sep|>", "one"),
]


@pytest.mark.parametrize(("output", "released", "content"), [case[1:] for case in STOPPED], ids=[c[0] for c in STOPPED])
@pytest.mark.parametrize("held", [0, 4])
def test_stop_strings_do_not_show(unified, output: str, released: str, content: str, held: int):
    """vLLM releases text `held` characters late and cuts it at the stop string; ids come at once and whole."""
    chat = request(stop=["wo th"])
    parser, got = make(unified, chat), ""
    ids, released = spell("<C>think<S><O>response<S>" + output), HEAD + released
    sent = 0
    for position, token in enumerate(ids):
        whole = TOKENIZER.k3.decode(ids[: position + 1])
        last = position == len(ids) - 1
        upto = len(released) if last else min(max(len(whole) - held, 0), len(released))
        delta = parser.parse_delta(released[sent:upto], [token], chat, PROMPT, finished=last)
        sent = max(sent, upto)
        got += (delta and delta.content) or ""
    assert got == content


def test_adjust_request_keeps_the_markers(unified):
    chat = make(unified, request()).adjust_request(request())
    assert chat.skip_special_tokens is False and chat.spaces_between_special_tokens is False
    assert chat.structured_outputs is None


CONSTRAINED = [
    ("auto", {"tools": TOOLS}, False),
    ("required", {"tools": TOOLS, "tool_choice": "required"}, True),
    ("named", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "weather"}}}, True),
    ("none", {"tools": TOOLS, "tool_choice": "none"}, True),
    ("one call at most", {"tools": TOOLS, "parallel_tool_calls": False}, True),
    ("strict", {"tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]}, True),
    ("json_object", {"response_format": {"type": "json_object"}}, True),
    (
        "json_schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}},
        True,
    ),
    ("json_object and tools", {"tools": TOOLS, "response_format": {"type": "json_object"}}, True),
    ("regex", {"structured_outputs": {"regex": "[a-z]+"}}, True),
    ("text", {"response_format": {"type": "text"}}, False),
]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(("fields", "constrained"), [case[1:] for case in CONSTRAINED], ids=[c[0] for c in CONSTRAINED])
def test_adjust_request_constrains(unified, fields: dict, constrained: bool, thinking: bool):
    chat = request(**fields)
    make(unified, chat, thinking).adjust_request(chat)
    assert (chat.structured_outputs is not None) is constrained
    if constrained:
        assert chat.response_format is None
        tag = json.loads(chat.structured_outputs.structural_tag)
        assert chat.to_sampling_params(10, {}).structured_outputs.structural_tag
        make(unified, chat, thinking).adjust_request(chat)
        assert json.loads(chat.structured_outputs.structural_tag) == tag


def test_other_parsers_stay_vllms(unified):
    other = ParserManager.get_parser("hermes", None, enable_auto_tools=True)
    assert other is not None and not issubclass(other, KimiK3Parser)


def test_another_tokenizer_is_refused():
    with pytest.raises(TypeError, match="--tokenizer-mode kimi_k3"):
        pieces_of(SimpleNamespace())


ENDS = [
    ("hm", False),
    ("hm<C>think<S>", True),
    ("hm<C> think <S>", True),
    ("hm<O>response<S>", True),
    ("hm<O>tools<S>", True),
    ("hm<C>response<S>", True),
    ("hm<C>message<S>", True),
    ("hm<E>", True),
    ("hm<O>note<S>", False),
    ("hm <|close|>think<|sep|>", False),
]


@pytest.mark.parametrize(("output", "ended"), ENDS)
@pytest.mark.parametrize("size", range(1, 6))
def test_reasoning_end_is_seen_in_the_delta_that_ends_it(output: str, ended: bool, size: int):
    parser = KimiK3ReasoningParser(TOKENIZER)
    ids = spell(output)
    seen = [
        parser.is_reasoning_end_streaming([*PROMPT, *ids[: at + size]], ids[at : at + size])
        for at in range(0, len(ids), size)
    ]
    assert seen == [False] * (len(seen) - 1) + [ended]
    assert parser.is_reasoning_end(ids) is ended


def test_reasoning_parser_without_thinking():
    parser = KimiK3ReasoningParser(TOKENIZER, chat_template_kwargs={"thinking": False})
    ids = spell("Hi")
    assert parser.is_reasoning_end(ids) and parser.is_reasoning_end_streaming(ids, ids)
    assert parser.extract_content_ids(ids) == ids


@pytest.mark.parametrize(
    ("output", "content"),
    [
        ("hm<C>think<S><O>response<S>Hi", "<O>response<S>Hi"),
        ("hm<O>response<S>Hi", "<O>response<S>Hi"),
        ("hm<O>tools<S>", "<O>tools<S>"),
        ("hm", ""),
    ],
)
def test_content_ids(output: str, content: str):
    assert KimiK3ReasoningParser(TOKENIZER).extract_content_ids(spell(output)) == spell(content)


def test_reasoning_and_tool_parser_apart():
    text = 'hm<|close|>think<|sep|>Hi<|open|>tools<|sep|><|open|>call tool="t" index="1"<|sep|><|close|>call<|sep|>'
    chat = request(tools=TOOLS)
    reasoning, rest = KimiK3ReasoningParser(TOKENIZER).extract_reasoning(text, chat)
    found = KimiK3ToolParser(TOKENIZER).extract_tool_calls(rest or "", chat)
    assert (reasoning, found.content, [c.function.name for c in found.tool_calls]) == ("hm", "Hi", ["t"])
    assert KimiK3ReasoningParser(TOKENIZER).extract_reasoning(text, request()) == ("hm", "Hi")
    delta = KimiK3ToolParser(TOKENIZER).extract_tool_calls_streaming("", "", "", [], [], spell(tools(call("t"))), chat)
    assert delta is not None and [(c.function.name, c.function.arguments) for c in delta.tool_calls] == [("t", "{}")]
    delta = KimiK3ReasoningParser(TOKENIZER).extract_reasoning_streaming("", "", "", [], [], spell("hm"))
    assert delta is not None and delta.reasoning == "hm"


def test_anthropic_calls_are_objects():
    def made(*arguments: str) -> list[ToolCall]:
        return [ToolCall(function=FunctionCall(name="t", arguments=text)) for text in arguments]

    assert [c.function.arguments for c in as_anthropic_calls(made('{"a": 1}', '{"b": "x'), cut=True)] == ['{"a": 1}']
    kept = [c.function.arguments for c in as_anthropic_calls(made("[1]", '{"b": "x'), cut=False)]
    assert kept == ['{"arguments": [1]}', '{"arguments": "{\\"b\\": \\"x"}']
