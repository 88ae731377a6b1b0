"""Types of arguments: what the model says, what the schema says, and what the text is."""

import json

import pytest

from tests.chat.shapes import argument, call, tools
from tests.chat.vocabulary import run, spell
from vllm_kimi_k3.chat.arguments import json_kind, resolve, schema_types
from vllm_kimi_k3.chat.repairs import Repair


def arguments_of(*elements: str, properties: dict | None = None, **schema) -> tuple[str, list[Repair]]:
    schemas = {"t": {"type": "object", "properties": properties or {}, **schema}}
    result = run(spell(f"<C>think<S>{tools(call('t', *elements))}<E>"), schemas=schemas)
    assert result.complete == [True]
    return result.arguments[0], result.repairs


S, N, B = Repair.TYPE_FROM_SCHEMA, Repair.VALUE_MISTYPED, Repair.VALUE_BROKEN
VALUES = [
    # type attribute, text, property schema, value in JSON, repair
    ("string", "", None, '""', None),
    ("string", 'quote " in \\ it', None, '"quote \\" in \\\\ it"', None),
    ("string", "two\nlines\tand \x01", None, '"two\\nlines\\tand \\u0001"', None),
    ("string", "👩‍👧 \u2028", None, '"👩‍👧 \u2028"', None),
    ("string", "007", {"type": "string"}, '"007"', None),
    ("string", "42", {"type": "string"}, '"42"', None),
    ("string", "42", {"type": "integer"}, "42", S),
    ("string", " 42", {"type": "integer"}, '" 42"', None),
    ("string", "forty", {"type": "integer"}, '"forty"', None),
    ("string", "4.5", {"type": "integer"}, '"4.5"', None),
    ("string", "null", {"type": ["integer", "null"]}, "null", S),
    ("string", "null", {"type": ["string", "null"]}, '"null"', None),
    ("string", '{"a": 1}', {"type": "object"}, '{"a": 1}', S),
    ("string", "true", {"anyOf": [{"type": "boolean"}, {"type": "number"}]}, "true", S),
    ("string", "2", {"enum": [1, 2]}, "2", S),
    ("number", "007", {"type": "string"}, '"007"', S),
    ("object", '{"a": 1}', {"type": "string"}, '"{\\"a\\": 1}"', S),
    ("number", "5", {"type": ["string", "null"]}, '"5"', S),
    ("number", "1e3", None, "1e3", None),
    ("number", "-0", None, "-0", None),
    ("number", "12345678901234567890", None, "12345678901234567890", None),
    ("number", "9" * 5000, None, "9" * 5000, None),
    ("number", "5", {"type": "integer"}, "5", None),
    ("number", "5.5", {"type": "integer"}, "5.5", None),
    ("integer", "5", None, "5", None),
    ("number", " 5\n", None, "5", None),
    ("number", "five", None, '"five"', B),
    ("number", "NaN", None, '"NaN"', B),
    ("number", "true", None, "true", N),
    ("number", "true", {"type": "boolean"}, "true", S),
    ("boolean", "true", None, "true", None),
    ("boolean", "True", None, '"True"', B),
    ("null", "null", None, "null", None),
    ("array", '[1, {"b": "\\ud800"}]', None, '[1, {"b": "\\ud800"}]', None),
    ("object", '{"a": 1', None, '"{\\"a\\": 1"', B),
    ("object", "", None, '""', B),
    ("int", "42", None, "42", Repair.TYPE_UNKNOWN),
    ("int", "many", None, '"many"', Repair.TYPE_UNKNOWN),
    ("int", "42", {"type": "string"}, '"42"', S),
]


@pytest.mark.parametrize(("kind", "text", "schema", "value", "repair"), VALUES)
def test_value(kind: str, text: str, schema: dict | None, value: str, repair: Repair | None):
    got, repairs = arguments_of(argument("k", kind, text), properties={"k": schema} if schema else None)
    assert got == f'{{"k": {value}}}'
    assert repairs == ([repair] if repair else [])
    json.loads(got, parse_int=str)


def test_no_argument():
    assert arguments_of() == ("{}", [])


def test_several_arguments_keep_order_and_keys_are_quoted():
    got, _ = arguments_of(argument("b&quot;", "string", "x"), argument("a", "number", "1"))
    assert got == '{"b\\"": "x", "a": 1}'


def test_last_of_equal_keys_wins():
    got, repairs = arguments_of(argument("k", "string", "old"), argument("k", "number", "2"))
    assert json.loads(got) == {"k": 2} and repairs == [Repair.ARGUMENT_REPEATED]


def test_argument_without_key_is_left_out():
    got, repairs = arguments_of('<O>argument type="string"<S>x<C>argument<S>', argument("k", "string", "v"))
    assert got == '{"k": "v"}' and repairs == [Repair.ARGUMENT_WITHOUT_KEY]


def test_argument_without_type_is_a_string():
    got, repairs = arguments_of('<O>argument key="k"<S>42<C>argument<S>')
    assert got == '{"k": "42"}' and repairs == [Repair.TYPE_UNKNOWN]


def test_json_element_is_all_arguments():
    text = '{"a": [1,  2],\n "b": "x"}'
    assert arguments_of(f'<O>json type="object"<S>{text}<C>json<S>') == (text, [])


@pytest.mark.parametrize("text", ["[1, 2]", '"x"', "{broken"])
def test_json_element_is_passed_as_it_is(text: str):
    got, repairs = arguments_of(f'<O>json type="object"<S>{text}<C>json<S>')
    assert got == text and repairs == ([Repair.JSON_ELEMENT_BROKEN] if text == "{broken" else [])


def test_blank_json_element():
    assert arguments_of('<O>json type="object"<S> <C>json<S>')[0] == "{}"


def test_json_element_does_not_mix_with_arguments():
    element = '<O>json type="object"<S>{"a": 1}<C>json<S>'
    assert arguments_of(element, argument("b", "number", "2")) == ('{"a": 1}', [Repair.JSON_ELEMENT_MIXED])
    assert arguments_of(argument("b", "number", "2"), element) == ('{"b": 2}', [Repair.JSON_ELEMENT_MIXED])


def test_unknown_tool_is_passed_on():
    result = run(spell(f"<C>think<S>{tools(call('other', argument('k', 'string', '42')))}<E>"), schemas={"t": {}})
    assert result.calls == [("other", '{"k": "42"}')]


TYPES = [
    ({"type": "string"}, {"string"}),
    ({"type": ["string", "null"]}, {"string", "null"}),
    ({"type": "string", "nullable": True}, {"string", "null"}),
    ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
    ({"const": 1.5}, {"number"}),
    ({"anyOf": [{"type": "string"}, {"type": "number"}]}, {"string", "number"}),
    ({"anyOf": [{"type": "string"}, {}]}, None),
    ({"oneOf": [{"$ref": "#/$defs/n"}]}, {"integer"}),
    ({"allOf": [{"type": ["string", "integer"]}, {"type": "number"}]}, {"integer"}),
    ({"$ref": "#/$defs/loop"}, None),
    ({"$ref": "other.json"}, None),
    ({}, None),
    (True, None),
]


@pytest.mark.parametrize(("schema", "expected"), TYPES)
def test_schema_types(schema, expected):
    root = {"$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert schema_types(schema, root) == (expected and frozenset(expected))


def test_resolve():
    root = {"a/b": [{"~": {"type": "null"}}]}
    assert resolve("#/a~1b/0/~0", root) == {"type": "null"}
    assert resolve("#", root) is root
    assert resolve("#/a~1b/7", root) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [("1", "integer"), ("1.0", "number"), ('"x"', "string"), ("[" * 100_000, None), ("", None), ("Infinity", None)],
)
def test_json_kind(text: str, kind: str | None):
    assert json_kind(text) == kind
