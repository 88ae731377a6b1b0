"""The parser's rules, shape by shape."""

import pytest

from tests.chat.shapes import SHAPES, Shape, argument, call, tools
from tests.chat.vocabulary import PIECES, SPECIALS, Result, run, spell, text_ids
from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Reasoning
from vllm_kimi_k3.chat.parser import Mode, OutputParser
from vllm_kimi_k3.chat.prompt import resume
from vllm_kimi_k3.chat.repairs import Repair


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_shape(shape: Shape):
    result = run(spell(shape.output), start=shape.start)
    assert (result.reasoning, result.content, result.calls) == (shape.reasoning, shape.content, shape.calls)
    assert result.repairs == shape.repairs


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
@pytest.mark.parametrize("size", range(1, 10))
def test_stream_equals_whole(shape: Shape, size: int):
    ids = spell(shape.output)
    whole = run(ids, start=shape.start)
    for offset in range(1, size + 1):
        assert run(ids, [offset, size], start=shape.start) == whole


def test_never_empty_is_opt_in():
    ids = spell("I have the answer.<E>")
    assert run(ids).content == ""
    assert run(ids, never_empty=True).content == "I have the answer."
    assert run(spell("cut thinking"), never_empty=True).content == "cut thinking"
    with_call = spell(f"hm<C>think<S>{tools(call('t'))}<E>")
    assert run(with_call, never_empty=True).content == ""


def test_name_comes_whole_and_once_before_arguments():
    name = "mcp__a_server_with_a_long_name__and_a_tool_with_a_long_name_too"
    ids = spell(f"<C>think<S>{tools(call(name, argument('k', 'string', 'value')))}<E>")
    parser = OutputParser(PIECES)
    events = [event for token in ids for event in parser.feed([token])]
    calls = [event for event in events if isinstance(event, CallStart | Arguments)]
    assert [event.name for event in calls if isinstance(event, CallStart)] == [name]
    assert isinstance(calls[0], CallStart) and calls[0].id.startswith("call_")


def test_string_argument_streams_at_once():
    opening = spell('<C>think<S><O>tools<S><O>call tool="w" index="1"<S><O>argument key="body" type="string"<S>')
    parser = OutputParser(PIECES)
    parser.feed(opening)
    for token in text_ids("abc de"):
        assert [type(event) for event in parser.feed([token])] == [Arguments]


def test_other_types_come_whole():
    ids = spell(f"<C>think<S>{tools(call('w', argument('list', 'array', '[1, 2, 3]')))}")
    parser = OutputParser(PIECES)
    pieces = [event.text for token in ids for event in parser.feed([token]) if isinstance(event, Arguments)]
    assert pieces == ['{"list": [1, 2, 3]', "}"]


def test_ids_of_calls_are_unique():
    ids = spell(f"<C>think<S>{tools(*[call('t')] * 5)}<E>")
    seen = {event.id for _ in range(3) for event in OutputParser(PIECES).feed(ids) if isinstance(event, CallStart)}
    assert len(seen) == 15


def test_characters_split_over_tokens_are_held_back():
    ids = [SPECIALS.close, *text_ids("think"), SPECIALS.sep, SPECIALS.open, *text_ids("response"), SPECIALS.sep]
    parser = OutputParser(PIECES)
    parser.feed(ids)
    assert parser.feed(list("😀".encode()[:3])) == []
    assert parser.feed(list("😀".encode()[3:])) == [Content("😀")]
    assert parser.feed([0xFF, *text_ids("a")]) == [Content("\ufffda")]


def test_bytes_cut_by_a_marker_are_replaced_and_by_the_end_dropped():
    half = list("😀".encode()[:2])
    broken = [*half, *spell("<C>think<S>")]
    assert run(broken).reasoning == "\ufffd" and run(broken).repairs == [Repair.BYTES_INVALID]
    assert run(half).reasoning == "" and run(half).repairs == [Repair.BYTES_CUT]


def test_reasoning_tokens_are_those_of_the_think_channel():
    parser = OutputParser(PIECES)
    thought = text_ids("some thoughts 😀")
    parser.feed([*thought, *spell("<C>think<S><O>response<S>An answer<C>response<S><E>")])
    assert parser.reasoning_tokens == len(thought)


def test_other_special_tokens_are_not_shown():
    ids = [*text_ids("a"), SPECIALS.media_pad, SPECIALS.bos, *text_ids("b")]
    result = run(ids)
    assert result.reasoning == "ab" and result.repairs == [Repair.SPECIAL_DROPPED] * 2


@pytest.mark.parametrize("end", ["end_of_msg", "eot", "eos"])
def test_every_end_token_ends(end: str):
    result = run([*spell("<C>think<S><O>response<S>Hi"), getattr(SPECIALS, end), *text_ids("more")])
    assert result.content == "Hi" and not result.cut


def test_ids_outside_the_vocabulary_give_nothing():
    assert run([10**9, -1, *text_ids("a")]).reasoning == "a"


PROMPT = '<O>message role="user"<S>Hi<C>message<S><E><O>message role="assistant"<S>'
PLACES = [
    ("thinking", "<O>think<S>", "hm<C>think<S><O>response<S>Hi", ("hm", "Hi")),
    ("thinking off", "<O>response<S>", "Hi<C>response<S>", ("", "Hi")),
    ("partial thinking", "<O>think<S>so far", " so good<C>think<S>Hi", (" so good", "Hi")),
    ("partial answer", "<O>think<S>hm<C>think<S><O>response<S>The answer", " is 42<C>response<S>", ("", " is 42")),
    ("partial answer with a marker spelled in it", "<O>response<S><|open|>think<|sep|>", "Hi", ("", "Hi")),
]


@pytest.mark.parametrize(("prompt", "output", "expected"), [place[1:] for place in PLACES], ids=[p[0] for p in PLACES])
def test_resume_from_the_prompt(prompt: str, output: str, expected: tuple[str, str]):
    parser = OutputParser(PIECES)
    assert resume(parser, spell(PROMPT + prompt))
    events = parser.feed(spell(output)) + parser.finish()
    result = Result(events, [])
    assert (result.reasoning, result.content) == expected


def test_resume_needs_an_open_message():
    assert not resume(OutputParser(PIECES), spell("no message"))
    assert not resume(OutputParser(PIECES), spell('<O>message role="user"<S>Hi<C>message<S><E>'))


def test_resume_does_not_count_the_prompt():
    parser = OutputParser(PIECES)
    resume(parser, spell(PROMPT + "<O>think<S>thought before"))
    assert parser.feed(spell("<C>response<S><E>")) == [] and parser.reasoning_tokens == 0


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_text_without_ids(size: int):
    text = (
        "hm<|close|>think<|sep|><|open|>response<|sep|>a < b <| c<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="t" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
    )
    parser = OutputParser(PIECES)
    events = [event for at in range(0, len(text), size) for event in parser.feed_text(text[at : at + size])]
    result = Result(events + parser.finish(), [])
    assert (result.reasoning, result.content, result.calls) == ("hm", "a < b <| c", [("t", "{}")])


def test_text_that_ends_like_a_marker_is_kept():
    parser = OutputParser(PIECES, Mode.RESPONSE)
    events = parser.feed_text("a <|clo") + parser.finish()
    assert Result(events, []).content == "a <|clo"


def test_lone_surrogates_in_text_are_replaced():
    parser = OutputParser(PIECES)
    assert parser.feed_text("a\ud800b") == [Reasoning("a\ufffdb")]


def test_deep_and_long_input_is_linear():
    nested = "[" * 200_000
    result = run(spell(f"<C>think<S>{tools(call('t', argument('a', 'array', nested)))}<E>"))
    assert result.repairs == [Repair.VALUE_BROKEN] and len(result.arguments[0]) == len(nested) + len('{"a": ""}')
