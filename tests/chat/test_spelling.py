import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.spelling import spell_arguments

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_object_and_its_dump_are_spelled_the_same(arguments: dict[str, object]) -> None:
    spelled = spell_arguments(arguments, "a")
    assert spell_arguments(json.dumps(arguments, ensure_ascii=False), "a") == spelled
    assert not isinstance(spelled, str)
    assert {e.key: e.text if e.type == "string" else json.loads(e.text) for e in spelled} == arguments


@given(st.text())
def test_any_string_gives_something(text: str) -> None:
    spelled = spell_arguments(text, "a")
    assert isinstance(spelled, list) or spelled == text


KEPT = {
    "blank": " \n",
    "list": "[1, 2]",
    "null": "null",
    "broken": '{"a": 1',
    "no-comma": '{"a": 1 "b": 2}',
    "bare-key": "{a: 1}",
    "trailing-comma": '{"a": 1,}',
    "control-character": '{"a": "x\ny"}',
    "too-deep": '{"a": ' + "[" * 200_000,
}


@pytest.mark.parametrize("text", KEPT.values(), ids=KEPT)
def test_what_is_no_object_stays_as_it_is(text: str) -> None:
    assert spell_arguments(text, "a") == text


@pytest.mark.parametrize("text", ["", "{}", " { } ", None, {}], ids=["empty", "object", "blanks", "null", "dict"])
def test_nothing_gives_no_arguments(text: object) -> None:
    assert spell_arguments(text, "a") == []


def test_spelling_is_kept() -> None:
    digits = "9" * 5000
    source = f'{{"a" : 1e2, "b":[1,2 ,3], "c": "\\u4e2d", "b": -0, "d": {digits}}} tail'
    assert spell_arguments(source, "a") == [
        ("a", "number", "1e2"),
        ("b", "array", "[1,2 ,3]"),
        ("c", "string", "中"),
        ("b", "number", "-0"),
        ("d", "number", digits),
    ]


def test_other_types_are_refused() -> None:
    with pytest.raises(RequestError, match=r"arguments: \[1\]: arguments are an object or a string"):
        spell_arguments([1], "arguments")
