"""Hands the thinking of a generated turn to the store that gives it back to forgetful clients."""

from collections.abc import Iterable

from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Event
from vllm_kimi_k3.chat.scope import RequestScope
from vllm_kimi_k3.chat.thinking import generated_turn, turn_keys
from vllm_kimi_k3.chat.vllm_renderer import store


class Turn:
    """What a client sees of a turn, collected while it is generated."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._starts: list[CallStart] = []
        self._arguments: list[list[str]] = []

    def extend(self, events: Iterable[Event]) -> None:
        """Add what was sent."""
        for event in events:
            if isinstance(event, Content):
                self._content.append(event.text)
            elif isinstance(event, CallStart):
                self._starts.append(event)
                self._arguments.append([])
            elif isinstance(event, Arguments):
                self._arguments[-1].append(event.text)

    def remember(self, request: RequestScope, reasoning: str) -> None:
        """Store the turn's thinking under its call ids and its visible text, where the request allows it."""
        thinking = store()
        conversation = request.conversation
        if thinking is None or conversation is None or not reasoning:
            return
        calls = [
            (start.id, start.name, "".join(parts)) for start, parts in zip(self._starts, self._arguments, strict=True)
        ]
        turn = generated_turn("".join(self._content), calls)
        thinking.put(turn_keys(request.tenant, conversation, turn), reasoning)
