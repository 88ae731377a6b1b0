"""Streams of the three APIs summed up as a client does, with the rules of the wire checked on the way."""

from collections import Counter
from collections.abc import Iterable
from typing import Any


class Streamed:
    """A streamed chat completion: a call's id and name come first, whole and once."""

    def __init__(self, chunks: Iterable[Any]) -> None:
        self.reasoning, self.content = "", ""
        self.calls: dict[int, list[str]] = {}
        self.finish: list[str] = []
        self.usage: Any = None
        self.argument_deltas = 0
        for chunk in chunks:
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self.finish += [choice.finish_reason] if choice.finish_reason else []
                self.reasoning += getattr(choice.delta, "reasoning", None) or ""
                self.content += choice.delta.content or ""
                for part in choice.delta.tool_calls or []:
                    self._add(part)

    def _add(self, part: Any) -> None:
        if part.index not in self.calls:
            assert part.id and part.function.name and part.type == "function"
            self.calls[part.index] = [part.id, part.function.name, ""]
        else:
            assert part.id is None and part.function.name is None
        self.argument_deltas += bool(part.function.arguments)
        self.calls[part.index][2] += part.function.arguments or ""


class Events:
    """A streamed response: events are numbered, each item is added and done once, in order."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.events = list(events)
        kinds = [event.type for event in self.events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        assert [event.sequence_number for event in self.events] == list(range(len(self.events)))
        added = [event.output_index for event in self.events if event.type == "response.output_item.added"]
        done = [event.output_index for event in self.events if event.type == "response.output_item.done"]
        assert added == done == list(range(len(added)))
        self.final = self.events[-1].response

    def text(self, kind: str) -> str:
        return "".join(event.delta for event in self.events if event.type == kind)


class Blocks:
    """A streamed message: blocks open and close one after the other, each once."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.blocks: list[list[Any]] = []
        self.stop_reason: str | None = None
        open_block, kinds = None, []
        for event in events:
            kinds.append(event.type)
            if event.type == "content_block_start":
                assert open_block is None and event.index == len(self.blocks)
                open_block = event.index
                self.blocks.append([event.content_block, ""])
            elif event.type == "content_block_delta":
                assert event.index == open_block
                delta = event.delta
                for name in ("text", "thinking", "partial_json"):
                    self.blocks[-1][1] += getattr(delta, name, None) or ""
            elif event.type == "content_block_stop":
                assert event.index == open_block
                open_block = None
            elif event.type == "message_delta":
                self.stop_reason = event.delta.stop_reason
        assert open_block is None
        counts = Counter(kinds)
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
        assert counts["message_start"] == counts["message_delta"] == counts["message_stop"] == 1

    @property
    def kinds(self) -> list[str]:
        return [block.type for block, _ in self.blocks]
