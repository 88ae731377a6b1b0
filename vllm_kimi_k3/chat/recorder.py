"""Remembers the thinking of the turn that is being generated, for the next request of the same conversation."""

from collections.abc import Iterable

from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Event, Reasoning
from vllm_kimi_k3.chat.scope import RequestScope
from vllm_kimi_k3.chat.thinking import ThinkingStore, generated_turn, turn_keys


class TurnRecorder:
    """Watches the events of one output and stores its thinking at the end.

    Args:
        store: where it goes.
        scope: the HTTP request that the output answers; it knows the tenant and the conversation.
    """

    def __init__(self, store: ThinkingStore, scope: RequestScope) -> None:
        self._store = store
        self._scope = scope
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._starts: list[CallStart] = []
        self._arguments: dict[int, list[str]] = {}

    def watch(self, events: Iterable[Event]) -> None:
        """Take the next events of the output, all of them, also those that the client does not get."""
        for event in events:
            if isinstance(event, Reasoning):
                self._reasoning.append(event.text)
            elif isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, CallStart):
                self._starts.append(event)
            elif isinstance(event, Arguments):
                self._arguments.setdefault(event.index, []).append(event.text)

    def finish(self) -> None:
        """Store the thinking, unless there is none or the conversation is not known for certain."""
        conversation = self._scope.conversation
        reasoning = "".join(self._reasoning)
        if conversation is None or not reasoning:
            return
        calls = [(start.id, start.name, "".join(self._arguments.get(start.index, ()))) for start in self._starts]
        turn = generated_turn("".join(self._content), calls)
        self._store.put(turn_keys(self._scope.tenant, conversation, turn), reasoning)
