"""Gives clients that drop the model's thinking their thinking back.

K3 wants to see all of its past thinking. Many clients do not send it, so the server remembers what it generated, in
memory only and within a bound, and puts it back where a turn comes without any. A turn is known by the ids of its tool
calls, which no other turn has, or by its visible text together with the whole conversation before it. Both are bound
to the API key.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from threading import Lock
from typing import Any

from vllm_kimi_k3.chat import identity
from vllm_kimi_k3.chat.history import Message

METRIC = "vllm:kimi_k3_thinking_turns"
# What an entry costs beside its text: keys, digests, tables.
_ENTRY_BYTES = 1000


class Outcome(Enum):
    """What happened to the thinking of a turn."""

    STORED = "stored"
    RESTORED = "restored"
    UNKNOWN = "unknown"
    EVICTED = "evicted"


@cache
def counter() -> Any:
    """The Prometheus counter of turns, labelled by outcome; made on first use, in the API process."""
    from prometheus_client import Counter

    metric = Counter(METRIC, "Turns whose thinking was stored, restored, not known or evicted.", ["outcome"])
    for outcome in Outcome:
        metric.labels(outcome.value)
    return metric


def record(outcome: Outcome) -> None:
    """Count one turn."""
    counter().labels(outcome.value).inc()


@dataclass(frozen=True)
class _Entry:
    reasoning: str
    keys: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return _ENTRY_BYTES + 4 * len(self.reasoning)


class ThinkingStore:
    """Thinking by turn, least recently used out first. Safe to use from several threads.

    Args:
        max_bytes: bound on what is held, counting four bytes a character; 0 holds nothing.
        count: told of every outcome.
    """

    def __init__(self, max_bytes: int, count: Callable[[Outcome], None] = record) -> None:
        self._max_bytes = max_bytes
        self._count = count
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._numbers: dict[bytes, int] = {}
        self._next = 0
        self._bytes = 0
        self._lock = Lock()

    @property
    def bytes_held(self) -> int:
        """Bytes that count against the bound."""
        return self._bytes

    def put(self, keys: Iterable[bytes], reasoning: str) -> None:
        """Remember the thinking of a turn under all of `keys`; a key that was there before now means this turn."""
        entry = _Entry(reasoning, tuple(keys))
        if entry.size > self._max_bytes or not entry.keys:
            return
        with self._lock:
            self._next += 1
            self._entries[self._next] = entry
            self._bytes += entry.size
            for key in entry.keys:
                self._numbers[key] = self._next
            while self._bytes > self._max_bytes:
                self._evict()
        self._count(Outcome.STORED)

    def get(self, keys: Iterable[bytes]) -> str | None:
        """The thinking under the first key that is known."""
        with self._lock:
            for key in keys:
                number = self._numbers.get(key)
                if number is not None:
                    self._entries.move_to_end(number)
                    return self._entries[number].reasoning
        return None

    def restore(self, tenant: bytes, messages: Sequence[Message]) -> list[Message]:
        """The messages, with the thinking of assistant turns that came without any put back where it is known."""
        restored = []
        conversation = tenant
        for message in messages:
            before, conversation = conversation, identity.follow(conversation, message)
            if message.role == "assistant" and not message.reasoning:
                reasoning = self.get(turn_keys(tenant, before, message))
                self._count(Outcome.UNKNOWN if reasoning is None else Outcome.RESTORED)
                if reasoning is not None:
                    message = replace(message, reasoning=reasoning)
            restored.append(message)
        return restored

    def _evict(self) -> None:
        number, entry = self._entries.popitem(last=False)
        self._bytes -= entry.size
        for key in entry.keys:
            if self._numbers.get(key) == number:
                del self._numbers[key]
        self._count(Outcome.EVICTED)


def conversation_of(tenant: bytes, messages: Iterable[Message]) -> bytes:
    """Digest of a whole conversation of one tenant."""
    conversation = tenant
    for message in messages:
        conversation = identity.follow(conversation, message)
    return conversation


def turn_keys(tenant: bytes, before: bytes, turn: Message) -> list[bytes]:
    """The keys of an assistant turn, given the conversation before it: its call ids first, then what is visible."""
    calls = [identity.digest(b"call", tenant, call.id) for call in turn.calls if call.id]
    if not turn.calls and not turn.content:
        return calls
    return [*calls, identity.of_turn(before, turn)]


def generated_turn(content: str, calls: Iterable[tuple[str, str, str]]) -> Message:
    """An assistant turn as the server sent it; `calls` are (id, name, arguments)."""
    made = [replace(identity.visible_call(name, arguments), id=call_id) for call_id, name, arguments in calls]
    return Message("assistant", content=(content,) if content else (), calls=tuple(made))
