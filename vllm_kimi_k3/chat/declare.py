"""The system messages that the server writes itself: tools, effort, tool choice, response format.

Their wording is part of the model's format and must match to the letter.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_kimi_k3.chat.errors import RequestError

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_MORE_TOOLS = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_CHOICES = {
    "required": ("The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."),
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_FORMAT = (
    "The system is invoked with `response_format={kind}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def tools_text(tools: Sequence[Mapping[str, Any]], field: str = "tools") -> str:
    """Declaration of the top-level tools: their order kept, keys sorted at every level, null fields dropped."""
    return _TOOLS + _fence(_clean(tools, field))


def more_tools_text(tools: Sequence[Mapping[str, Any]], field: str) -> str:
    """Declaration of tools that a system message adds in mid-conversation."""
    return _MORE_TOOLS + _fence(_clean(tools, field))


def effort_text(effort: str) -> str:
    """The effort message for `low`, `high` or `max`."""
    return _EFFORT.format(effort=effort)


def tool_choice_text(choice: object) -> str | None:
    """The message for a tool choice; None for `auto`, a named tool and nothing, which write none."""
    if choice is None or choice == "auto" or isinstance(choice, Mapping):
        return None
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice]
    raise RequestError("tool_choice", choice, 'use "auto", "none", "required" or {"type": "function", …}')


def response_format_text(response_format: Mapping[str, Any] | None) -> str | None:
    """The message for a response format; None for `text` and nothing."""
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return _FORMAT.format(kind=kind)
    if kind == "json_schema":
        return _FORMAT.format(kind=kind) + _SCHEMA + _fence(_schema(response_format))
    raise RequestError("response_format.type", kind, "use text, json_object or json_schema")


def _schema(response_format: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, wherever clients put it: `json_schema.schema`, `json_schema.json_schema` or `json_schema` itself."""
    schema = response_format.get("json_schema")
    for key in ("schema", "json_schema"):
        if isinstance(schema, Mapping) and key in schema:
            schema = schema[key]
            break
    if not isinstance(schema, Mapping):
        raise RequestError("response_format.json_schema.schema", schema, "a JSON schema is an object")
    return schema


def _clean(tools: Sequence[Mapping[str, Any]], field: str) -> list[Any]:
    """Tools without null fields, inside `function` too; schemas below it stay as they are."""
    cleaned = []
    for position, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"{field}[{position}]", tool, "a tool is an object with type and function")
        kept = {key: value for key, value in tool.items() if value is not None}
        if isinstance(function := kept.get("function"), Mapping):
            kept["function"] = {key: value for key, value in function.items() if value is not None}
        cleaned.append(kept)
    return cleaned


def _fence(value: object) -> str:
    return f"```json\n{json.dumps(value, ensure_ascii=False, separators=(',', ':'), sort_keys=True)}\n```"
