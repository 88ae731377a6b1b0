"""Arguments of a past tool call, each with its type and its text as the model wrote it.

A client sends arguments back as a JSON string. Its values are not parsed and dumped again: `1e2` stays `1e2`, so the
history keeps the ids that the model produced and the prefix cache keeps its hits.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vllm_kimi_k3.chat.errors import RequestError

_BLANKS = re.compile(r"[ \t\n\r]*")
# Only types matter here. Python refuses to convert numbers of more than 4,300 digits, so none is converted.
_DECODER = json.JSONDecoder(parse_int=lambda _: 0, parse_float=lambda _: 0.0, parse_constant=lambda _: 0.0)


class Argument(NamedTuple):
    """One argument of a call; `text` is raw for a string and JSON otherwise."""

    key: str
    type: str
    text: str


def spell_arguments(arguments: object, field: str) -> list[Argument] | str:
    """The arguments of a call in the history.

    Args:
        arguments: an object, a JSON string, or nothing.
        field: where they stand in the request, for the error.

    Returns:
        One entry for each key, in order, repeated keys too; or the text itself where it is not a JSON object, to be
        written as one `json` element. Text behind the object's closing brace is not part of it.

    Raises:
        RequestError: the arguments are neither an object nor a string.
    """
    if arguments is None or arguments == "":
        return []
    if isinstance(arguments, Mapping):
        return [_spell_value(str(key), value) for key, value in arguments.items()]
    if not isinstance(arguments, str):
        raise RequestError(field, arguments, "arguments are an object or a string of JSON")
    try:
        return _scan_object(arguments)
    except (ValueError, RecursionError):
        return arguments


def json_type(value: Any) -> str:
    """K3's type name for a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def _spell_value(key: str, value: Any) -> Argument:
    kind = json_type(value)
    return Argument(key, kind, value if kind == "string" else json.dumps(value, ensure_ascii=False))


def _scan_object(source: str) -> list[Argument]:
    """Entries of the JSON object that `source` starts with. Raises ValueError where it is not one."""

    def skip(position: int) -> int:
        match = _BLANKS.match(source, position)
        return match.end() if match else position

    def expect(character: str, position: int) -> int:
        position = skip(position)
        if source[position : position + 1] != character:
            raise ValueError(f"expected {character!r} at {position}")
        return position + 1

    found: list[Argument] = []
    position = skip(expect("{", 0))
    if source[position : position + 1] == "}":
        return found
    while True:
        position = expect('"', position) - 1
        key, position = _DECODER.raw_decode(source, position)
        start = skip(expect(":", position))
        value, position = _DECODER.raw_decode(source, start)
        kind = json_type(value)
        found.append(Argument(key, kind, value if kind == "string" else source[start:position]))
        position = skip(position)
        if source[position : position + 1] == "}":
            return found
        position = expect(",", position)
