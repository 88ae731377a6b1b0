"""Random outputs, whole and damaged: the parser never raises and a stream equals the whole."""

import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.shapes import argument, tools
from tests.chat.vocabulary import SPECIALS, run, spell
from vllm_kimi_k3.chat.parser import Mode
from vllm_kimi_k3.chat.repairs import Repair

# Spelled markers, half characters and markup are in the text on purpose.
BITS = [
    "a",
    "think",
    " ",
    "\n",
    "😀",
    "é",
    '"',
    "\\",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|",
    "=",
    "{}",
    "12",
    "response",
    "\u2028",
]
texts = st.lists(st.sampled_from(BITS), max_size=8).map("".join)
names = st.sampled_from(["list_dir", "f", 'a"b', "ns.tool-1", "π"])
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    texts | scalars, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2), max_leaves=4
)
calls = st.tuples(names, st.dictionaries(texts, values, max_size=4))


def kind_of(value: object) -> str:
    for kind, name in ((str, "string"), (bool, "boolean"), (int | float, "number"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null"


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def render_call(name: str, arguments: dict, index: int) -> str:
    inner = "".join(
        argument(
            escape(key), kind_of(value), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        )
        for key, value in arguments.items()
    )
    return f'<O>call tool="{escape(name)}" index="{index}"<S>{inner}<C>call<S>'


@st.composite
def outputs(draw) -> tuple[str, str, str, list]:
    reasoning, content, made = draw(texts), draw(texts), draw(st.lists(calls, max_size=3))
    channel = tools(*(render_call(*one, index) for index, one in enumerate(made, 1))) if made else ""
    return (
        f"{reasoning}<C>think<S><O>response<S>{content}<C>response<S>{channel}<C>message<S><E>",
        reasoning,
        content,
        made,
    )


MARKUP = ["<O>", "<C>", "<S>", "<E>", "think", "response", "tools", "call", "argument", "json", "message", "note"]
ATTRIBUTES = [' key="a"', ' tool="t"', ' type="number"', " type='string'"]
soups = st.lists(st.sampled_from(MARKUP + ATTRIBUTES + BITS), max_size=60).map("".join)


@settings(max_examples=60, deadline=None)
@given(outputs(), st.randoms(use_true_random=False))
def test_what_was_written_is_read(output, random: Random):
    text, reasoning, content, made = output
    result = run(spell(text, random))
    assert (result.reasoning, result.content) == (reasoning, content)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == made
    assert all(result.complete) and len(set(result.ids)) == len(made) and not result.cut and not result.repairs


def damage(ids: list[int], random: Random) -> list[int]:
    """Drop, repeat or swap special tokens, and perhaps cut the end."""
    ids = ids.copy()
    for _ in range(random.randint(1, 3)):
        special = [at for at, token in enumerate(ids) if token in SPECIALS]
        if not special:
            break
        at, other = random.choice(special), random.choice(special)
        match random.randrange(3):
            case 0:
                del ids[at]
            case 1:
                ids.insert(at, ids[at])
            case 2:
                ids[at], ids[other] = ids[other], ids[at]
    return ids[: random.randint(0, len(ids))] if random.random() < 0.5 else ids


def check_stream(ids: list[int], random: Random) -> None:
    start = random.choice([Mode.THINK, Mode.RESPONSE])
    schemas = {"t": {"properties": {"a": {"type": random.choice(["string", "integer"])}}}}
    whole = run(ids, start=start, schemas=schemas)
    splits = [[size] for size in range(1, 10)] + [[random.randint(1, 9) for _ in range(len(ids) + 1)]]
    for cuts in splits:
        assert run(ids, cuts, start=start, schemas=schemas) == whole
    for arguments, complete in zip(whole.arguments, whole.complete, strict=True):
        if complete and Repair.JSON_ELEMENT_BROKEN not in whole.repairs:
            json.loads(arguments)


@settings(max_examples=60, deadline=None)
@given(outputs(), st.randoms(use_true_random=False))
def test_damaged_output_streams_as_the_whole(output, random: Random):
    check_stream(damage(spell(output[0], random), random), random)


@settings(max_examples=60, deadline=None)
@given(soups, st.randoms(use_true_random=False))
def test_any_soup_of_markers_streams_as_the_whole(soup: str, random: Random):
    check_stream(spell(soup, random), random)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, SPECIALS.vocab_size - 1), max_size=80), st.randoms(use_true_random=False))
def test_any_ids_stream_as_the_whole(ids: list[int], random: Random):
    check_stream(ids, random)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40), st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_bytes_decode_as_a_whole(data: bytes, cuts: list[int]):
    ids = [*data, *spell("<C>think<S>")]
    assert run(ids, cuts).reasoning == data.decode(errors="replace")
