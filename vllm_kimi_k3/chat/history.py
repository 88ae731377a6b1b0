"""Messages as clients send them, brought into the one form that is rendered.

Clients name the thinking `reasoning` or `reasoning_content` or send it as a content block, leave out ids, send results
in any order, and put content into strings or parts. All of that ends here.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.spelling import Argument, spell_arguments

logger = logging.getLogger("vllm.vllm_kimi_k3.chat")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "tool_reference": "name",
}
IMAGE_PARTS = frozenset({"image_url", "input_image", "image", "image_pil"})


@dataclass(frozen=True)
class Image:
    """An image part: where it comes from. The renderer takes its size from the request's slots."""

    source: str = ""


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant turn; `arguments` is a list of arguments, or raw text for one `json` element."""

    id: str | None
    name: str
    arguments: list[Argument] | str


@dataclass(frozen=True)
class Message:
    """One message, ready to be rendered. `role` is system, user, assistant or tool; content parts stay apart."""

    role: str
    content: tuple[str | Image, ...] = ()
    name: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    partial: bool = False
    #: Tool results only: position in the request, and 1-based count since the last assistant turn.
    field: str = field(default="", compare=False)
    index: int = 0

    @property
    def text(self) -> str:
        """The text of the content, images left out."""
        return "".join(part for part in self.content if isinstance(part, str))


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """All messages of a request in the order in which they are rendered.

    Runs of tool results are sorted into the order of the calls, and named after them.

    Raises:
        RequestError: a role, a content part, a call or arguments that have no meaning, or a result without a name.
    """
    read = [_read(message, f"messages[{position}]") for position, message in enumerate(messages)]
    return list(_place_results(read))


def _read(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(where, message, "a message is an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role", role, f"use one of {', '.join(_ROLES)}")
    content, thoughts = _read_content(message.get("content"), f"{where}.content")
    result = Message(role=_ROLES[role], content=content, name=_text(message.get("name"), f"{where}.name"), field=where)
    if result.role == "system" and message.get("tools"):
        if content:
            logger.warning("%s carries tools: K3's format writes the declaration only, its content is left out", where)
        return replace(result, tools=_sequence(message["tools"], f"{where}.tools"))
    if result.role == "assistant":
        calls = _sequence(message.get("tool_calls") or (), f"{where}.tool_calls")
        return replace(
            result,
            reasoning=_reasoning(message, thoughts, where),
            calls=tuple(_read_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)),
            partial=message.get("partial") is True,
        )
    if result.role == "tool":
        name = _text(message.get("tool"), f"{where}.tool") or result.name
        return replace(result, name=name, call_id=_id(message.get("tool_call_id")))
    return result


def _read_content(content: object, where: str) -> tuple[tuple[str | Image, ...], str]:
    """Content parts, and the thinking that came as content blocks."""
    if content is None or content == "":
        return (), ""
    if isinstance(content, str):
        return (content,), ""
    parts: list[str | Image] = []
    thoughts = ""
    for position, part in enumerate(_sequence(content, where)):
        if isinstance(part, str):
            parts.append(part)
            continue
        at = f"{where}[{position}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _TEXT_PARTS:
            parts.append(_text(part.get(_TEXT_PARTS[kind]), f"{at}.{_TEXT_PARTS[kind]}"))
        elif kind == "thinking":
            thoughts += _text(part.get("thinking"), f"{at}.thinking")
        elif kind in IMAGE_PARTS:
            parts.append(Image(_source(part)))
        elif kind != "redacted_thinking":
            raise RequestError(at, part, "K3 takes text and image_url parts")
    return tuple(part for part in parts if part != ""), thoughts


def _reasoning(message: Mapping[str, Any], thoughts: str, where: str) -> str:
    """The thinking of a turn; of several spellings the first that says something."""
    for key in ("reasoning_content", "reasoning"):
        if value := _text(message.get(key), f"{where}.{key}"):
            return value
    return thoughts


def _read_call(call: object, where: str) -> Call:
    if not isinstance(call, Mapping):
        raise RequestError(where, call, "a tool call is an object")
    # Some clients leave out `function` and put name and arguments into the call itself.
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where}.function.name", name, "a tool call needs the name of its function")
    arguments = spell_arguments(function.get("arguments"), f"{where}.function.arguments")
    return Call(_id(call.get("id")), name, arguments)


def _place_results(messages: Sequence[Message]) -> Iterator[Message]:
    calls: tuple[Call, ...] = ()
    count = 0
    run: list[Message] = []

    def place() -> Iterator[Message]:
        nonlocal count
        for message in _sort_run(run, calls, count):
            count += 1
            yield replace(message, index=count)
        run.clear()

    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        yield from place()
        if message.role == "assistant":
            calls, count = message.calls, 0
        yield message
    yield from place()


def _sort_run(run: Sequence[Message], calls: Sequence[Call], count: int) -> list[Message]:
    """A run of results in the order of their calls, named.

    If any id of the run is unknown, the whole run stays as it came, and a result without a name takes that of the call
    in its place. Of calls with the same id the first counts; `name:position` (from 0) is an id too.
    """
    positions: dict[str, int] = {}
    for position, call in enumerate(calls):
        if call.id is not None:
            positions.setdefault(call.id, position)
    for position, call in enumerate(calls):
        positions.setdefault(f"{call.name}:{position}", position)
    if all(message.call_id in positions for message in run):
        placed = sorted((positions[message.call_id or ""], order) for order, message in enumerate(run))
        return [replace(run[order], name=calls[position].name) for position, order in placed]
    named = []
    for position, message in enumerate(run, count):
        name = message.name or (calls[position].name if position < len(calls) else "")
        if not name:
            raise RequestError(
                f"{message.field}.tool_call_id", message.call_id, "no call has this id; give the tool's name in `name`"
            )
        named.append(replace(message, name=name))
    return named


def _source(part: Mapping[str, Any]) -> str:
    """A string that differs for different images: address or data."""
    given = {key: value for key, value in part.items() if key != "type"}
    return json.dumps(given, sort_keys=True, default=str)


def _id(value: object) -> str | None:
    return None if value is None or value == "" else str(value)


def _text(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RequestError(where, value, "expected a string")
    return value


def _sequence(value: object, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(where, value, "expected a list")
    return value
