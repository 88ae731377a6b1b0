"""JSON schemas as a grammar can take them: as they are where possible, relaxed with a warning where not."""

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from vllm_kimi_k3.chat.arguments import resolve

logger = logging.getLogger("vllm.vllm_kimi_k3.chat")

_TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LARGEST_BOUND = 2**31 - 1
_ROOT = "document"


def compiles(schema: Any) -> str | None:
    """Why xgrammar does not accept a schema, or None if it does."""
    import xgrammar

    try:
        xgrammar.Grammar.from_json_schema(json.dumps(schema))
    except (RuntimeError, ValueError, RecursionError) as error:
        return str(error).strip().splitlines()[0]
    return None


def enforceable(schema: Any, fallback: Any) -> Any:
    """`schema` if a grammar can enforce it, else a weaker one that it implies, at worst `fallback`, with a warning."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):
        logger.warning("a schema is no JSON and is not enforced")
        return fallback
    return json.loads(_enforceable(text, json.dumps(fallback)))


@lru_cache(maxsize=1024)
def _enforceable(text: str, fallback: str) -> str:
    schema = json.loads(text)
    problem = compiles(schema)
    if problem is None:
        return text
    try:
        relaxed = _relax(schema, schema)
    except RecursionError:
        relaxed = None
    if relaxed is not None and compiles(relaxed) is None:
        logger.warning("a schema is enforced only in part: %s; schema: %.500s", problem, text)
        return json.dumps(relaxed)
    logger.warning("a schema is not enforced: %s; schema: %.500s", problem, text)
    return fallback


def _relax(node: Any, root: Any) -> Any:
    """Leave out the keywords that no grammar can be made of: unusable values and references that lead nowhere."""
    if isinstance(node, list):
        return [_relax(item, root) for item in node]
    if not isinstance(node, Mapping):
        return node
    return {key: _relax(value, root) for key, value in node.items() if _usable(key, value, root)}


def _usable(key: str, value: Any, root: Any) -> bool:
    if key == "$ref":
        return isinstance(value, str) and resolve(value, root) is not None
    if key in _BOUNDS and not isinstance(value, Mapping):
        return isinstance(value, int) and 0 <= value <= _LARGEST_BOUND
    if key == "type" and not isinstance(value, Mapping):
        names = value if isinstance(value, list) else [value]
        return bool(names) and all(name in _TYPES for name in names)
    if key in ("properties", "$defs", "definitions", "patternProperties"):
        return isinstance(value, Mapping)
    if key == "required":
        return isinstance(value, Mapping) or (isinstance(value, list) and all(isinstance(name, str) for name in value))
    return True


def part(root: Mapping[str, Any], schema: Any) -> Any:
    """`schema`, taken out of `root`, as a document of its own whose references still lead home."""
    if not isinstance(schema, Mapping) or '"$ref"' not in json.dumps(schema):
        return schema
    return {**_rebase(schema), "$defs": {_ROOT: _rebase(root)}}


def _rebase(node: Any) -> Any:
    if isinstance(node, list):
        return [_rebase(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    rebased = {key: _rebase(value) for key, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        rebased["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return rebased
