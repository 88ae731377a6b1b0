import json
from typing import Any

import pytest

from vllm_kimi_k3.chat.leniency import loosen


def loosened(body: dict[str, Any]) -> dict[str, Any]:
    return json.loads(loosen(json.dumps(body).encode()))


def turn(*calls: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": list(calls), **fields}]}


GOOD = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "object": (
        GOOD | {"function": {"name": "f", "arguments": {"é": [1, 2.0]}}},
        GOOD | {"function": {"name": "f", "arguments": '{"é": [1, 2.0]}'}},
    ),
    "null": (
        GOOD | {"function": {"name": "f", "arguments": None}},
        GOOD | {"function": {"name": "f", "arguments": ""}},
    ),
    "missing": (GOOD | {"function": {"name": "f"}}, GOOD | {"function": {"name": "f", "arguments": ""}}),
    "flat": ({"id": "a", "name": "f", "arguments": "{}"}, GOOD),
    "no-id": ({"function": GOOD["function"], "id": None}, GOOD | {"id": ""}),
    "extra-stays": (GOOD | {"index": 0, "type": None}, GOOD | {"index": 0}),
}


@pytest.mark.parametrize(("sent", "taken"), CALLS.values(), ids=CALLS)
def test_calls(sent: dict[str, Any], taken: dict[str, Any]) -> None:
    assert loosened(turn(sent)) == turn(taken)


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning_content": "", "reasoning": "b"}, "b"),
        ({"reasoning_content": "a", "reasoning": ""}, "a"),
        ({"reasoning_content": None, "reasoning": None}, None),
    ],
)
def test_two_spellings_of_the_thinking(fields: dict[str, Any], reasoning: str | None) -> None:
    assert loosened(turn(**fields))["messages"][0] == {"role": "assistant", "tool_calls": [], "reasoning": reasoning}


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (SCHEMA, {"name": "response", "schema": SCHEMA}),
        ({"schema": SCHEMA, "strict": True}, {"name": "response", "schema": SCHEMA, "strict": True}),
        ({"json_schema": SCHEMA}, {"name": "response", "schema": SCHEMA}),
        ({"name": "n", "schema": SCHEMA}, {"name": "n", "schema": SCHEMA}),
    ],
    ids=["bare", "unnamed", "nested", "complete"],
)
def test_schemas(sent: dict[str, Any], taken: dict[str, Any]) -> None:
    body = {"messages": [], "response_format": {"type": "json_schema", "json_schema": sent}}
    assert loosened(body)["response_format"]["json_schema"] == taken


def test_an_empty_list_of_tools_goes_away() -> None:
    assert loosened({"messages": [], "tools": [], "tool_choice": "auto"}) == {"messages": []}
    assert loosened({"messages": [], "tools": [], "tool_choice": "required"}) == {
        "messages": [],
        "tool_choice": "required",
    }


UNTOUCHED = {
    "nothing-to-do": json.dumps(turn(GOOD), indent=1).encode(),
    "no-json": b'{"tool_calls"',
    "no-object": b'["tool_calls"]',
    "odd-messages": b'{"tool_calls": 1, "messages": [1, {"tool_calls": 2}, {"tool_calls": [3]}]}',
    "list-arguments": json.dumps(turn(GOOD | {"function": {"name": "f", "arguments": [1]}})).encode(),
    "huge-number": b'{"tools": ' + b"9" * 5000 + b"}",
    "deep": b'{"tools": ' + b"[" * 200_000,
    "not-utf-8": b'{"tool_calls": "\xff"}',
    "empty": b"",
}


@pytest.mark.parametrize("body", UNTOUCHED.values(), ids=UNTOUCHED)
def test_everything_else_passes_byte_for_byte(body: bytes) -> None:
    assert loosen(body) == body
