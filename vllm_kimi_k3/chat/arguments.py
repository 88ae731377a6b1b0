"""Values of tool-call arguments: from the model's text and two opinions on its type to JSON text."""

import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Any

from vllm_kimi_k3.chat.repairs import Repair

Schema = Mapping[str, Any] | bool

_JSON_TYPES = frozenset({"number", "integer", "boolean", "null", "object", "array"})
_BLANKS = " \t\r\n"
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_REF_DEPTH = 32


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# Numbers stay text: huge integers are valid JSON, but Python refuses to convert more than 4,300 digits.
_decoder = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refuse)


def quote(text: str) -> str:
    """`text` as a JSON string, non-ASCII characters as they are."""
    return encode_basestring(text)


def escape(text: str) -> str:
    """`text` as the inside of a JSON string. Pieces escaped apart and joined are valid wherever the text was cut."""
    return encode_basestring(text)[1:-1]


def json_kind(text: str) -> str | None:
    """Type of the JSON value that `text` spells (blanks around it allowed), `integer` where it is one; None if none."""
    body = text.strip(_BLANKS)
    try:
        value = _decoder.decode(body)
    except (ValueError, RecursionError):
        return None
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "array"
    if body[0] == '"':
        return "string"
    return "integer" if _INTEGER.fullmatch(body) else "number"


def schema_types(schema: Schema | None, root: Schema | None = None, depth: int = 0) -> frozenset[str] | None:
    """JSON types that a schema allows, None where it does not limit them.

    Looks at `type`, `nullable`, `enum`, `const`, `anyOf`, `oneOf`, `allOf` and local `$ref`s; `root` is the document
    that the references point into.
    """
    if not isinstance(schema, Mapping) or depth > _REF_DEPTH:
        return None
    limits: list[frozenset[str] | None] = []
    declared = schema.get("type")
    if isinstance(declared, str):
        limits.append(frozenset({declared}))
    elif isinstance(declared, list):
        limits.append(frozenset(name for name in declared if isinstance(name, str)))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        limits.append(frozenset(json_kind(json.dumps(value)) or "string" for value in values))
    for word in ("anyOf", "oneOf"):
        branches = schema.get(word)
        if isinstance(branches, list) and branches:
            types = [schema_types(branch, root, depth + 1) for branch in branches]
            limits.append(None if None in types else frozenset().union(*(t for t in types if t is not None)))
    if isinstance(schema.get("allOf"), list):
        limits.extend(schema_types(part, root, depth + 1) for part in schema["allOf"])
    if isinstance(schema.get("$ref"), str):
        limits.append(schema_types(resolve(schema["$ref"], root), root, depth + 1))
    known = [types for types in limits if types]
    if not known:
        return None
    allowed = known[0]
    for limit in known[1:]:
        allowed = frozenset(t for t in allowed if fits(t, limit)) or allowed
    return allowed | {"null"} if schema.get("nullable") is True else allowed


def resolve(reference: str, root: Schema | None) -> Schema | None:
    """The part of `root` that a local reference (`#/a/b`) names; None for anything else."""
    if not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, Mapping) and step in node:
            node = node[step]
        else:
            return None
    return node if isinstance(node, Mapping | bool) else None


def fits(kind: str | None, allowed: frozenset[str]) -> bool:
    """Whether a value of type `kind` is allowed; an integer is a number too."""
    return kind in allowed or (kind == "integer" and "number" in allowed)


def is_text(declared: str | None, allowed: frozenset[str] | None) -> bool:
    """Whether an argument is a string whatever its text turns out to be, so that it can be streamed.

    `declared` is the `type` attribute (None if missing), `allowed` the schema's types (None if it does not say).
    """
    if declared in (None, "string"):
        return allowed is None or "string" in allowed if declared else allowed is None or allowed == {"string"}
    return allowed == {"string"}


def json_value(declared: str | None, allowed: frozenset[str] | None, text: str) -> tuple[str, Repair | None]:
    """JSON text of a complete value that is not :func:`is_text`, and the repair that it took.

    A valid value keeps its spelling (`1e3`, `-0`, digits beyond any float).
    """
    kind = json_kind(text)
    value = text.strip(_BLANKS)
    in_schema = allowed is not None and kind is not None and fits(kind, allowed)
    if declared == "string":
        return (value, Repair.TYPE_FROM_SCHEMA) if in_schema and value == text else (quote(text), None)
    if declared not in _JSON_TYPES:
        if in_schema or (allowed is None and kind not in (None, "string")):
            return value, Repair.TYPE_UNKNOWN
        return quote(text), Repair.TYPE_UNKNOWN
    if allowed is not None and not in_schema and "string" in allowed:
        return quote(text), Repair.TYPE_FROM_SCHEMA
    if kind is None:
        return quote(text), Repair.VALUE_BROKEN
    # "integer" is no K3 type, but who writes it means a number.
    if fits(kind, frozenset({"number" if declared == "integer" else declared or ""})):
        return value, None
    return value, Repair.TYPE_FROM_SCHEMA if in_schema else Repair.VALUE_MISTYPED
