"""Assembles tool calls: `call`, `argument` and `json` elements become names and JSON text."""

from collections.abc import Callable, Mapping

from vllm_kimi_k3.chat.arguments import Schema, is_text, json_kind, json_value, quote, schema_types
from vllm_kimi_k3.chat.events import Arguments, CallEnd, CallStart, Event
from vllm_kimi_k3.chat.repairs import Repair


class CallWriter:
    """The call being written. `events` receives what is ready to be sent.

    `schemas` maps a tool's name to its `parameters` schema; `new_id` makes ids that are unique in the conversation.
    """

    def __init__(
        self,
        events: list[Event],
        schemas: Mapping[str, Schema],
        new_id: Callable[[], str],
        on_repair: Callable[[Repair], None],
    ) -> None:
        self._events = events
        self._schemas = schemas
        self._new_id = new_id
        self._repair = on_repair
        self.index = -1
        self._schema: Schema | None = None
        self._keys: set[str] = set()
        self._whole = False
        self._key: str | None = None
        self._declared: str | None = None
        self._allowed: frozenset[str] | None = None
        self.buffer: list[str] = []
        self.streaming = False

    def start(self, attributes: Mapping[str, str]) -> bool:
        """Begin a call. False if it has no name, then nothing begins."""
        name = attributes.get("tool", "")
        if not name:
            self._repair(Repair.CALL_WITHOUT_NAME)
            return False
        self.index += 1
        self._schema = self._schemas.get(name)
        self._keys = set()
        self._whole = False
        self._events.append(CallStart(self.index, self._new_id(), name))
        return True

    def open_argument(self, attributes: Mapping[str, str]) -> bool:
        """Begin an argument. False if it is to be ignored."""
        key = attributes.get("key")
        if key is None or self._whole:
            self._repair(Repair.ARGUMENT_WITHOUT_KEY if key is None else Repair.JSON_ELEMENT_MIXED)
            return False
        if key in self._keys:
            # JSON readers keep the last of equal keys, and what was sent cannot be taken back.
            self._repair(Repair.ARGUMENT_REPEATED)
        self._key = key
        self._declared = attributes.get("type")
        self._allowed = self._argument_types(key)
        self.streaming = is_text(self._declared, self._allowed)
        self.buffer.clear()
        if self.streaming:
            if self._declared is None:
                self._repair(Repair.TYPE_UNKNOWN)
            elif self._declared != "string":
                self._repair(Repair.TYPE_FROM_SCHEMA)
            self._send(f'{self._prefix()}"')
        return True

    def open_json(self) -> bool:
        """Begin a `json` element, which holds all arguments as they are. False if it is to be ignored."""
        if self._keys or self._whole:
            self._repair(Repair.JSON_ELEMENT_MIXED)
            return False
        self._key = None
        self.streaming = False
        self.buffer.clear()
        return True

    def close_value(self) -> None:
        """End the open argument or `json` element."""
        if self.streaming:
            self.streaming = False
            self._send('"')
            return
        text = "".join(self.buffer)
        self.buffer.clear()
        if self._key is None:
            self._whole = True
            if json_kind(text) is None:
                self._repair(Repair.JSON_ELEMENT_BROKEN)
            self._send(text if text.strip() else "{}")
            return
        value, repair = json_value(self._declared, self._allowed, text)
        if repair:
            self._repair(repair)
        self._send(self._prefix() + value)

    def end(self) -> None:
        """End the open call, whose values are closed."""
        if not self._whole:
            self._send("}" if self._keys else "{}")
        self._events.append(CallEnd(self.index))

    def _prefix(self) -> str:
        assert self._key is not None
        opener = ", " if self._keys else "{"
        self._keys.add(self._key)
        return f"{opener}{quote(self._key)}: "

    def _argument_types(self, key: str) -> frozenset[str] | None:
        if not isinstance(self._schema, Mapping):
            return None
        properties = self._schema.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return None
        return schema_types(properties[key], self._schema)

    def _send(self, text: str) -> None:
        if text:
            self._events.append(Arguments(self.index, text))
