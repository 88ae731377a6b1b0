"""The parser of Kimi K3's output: one state machine over token ids, with constant work a token.

Streaming and whole-output parsing are the same calls, so they cannot differ. Only special ids are structure: text
that merely spells a marker is data. Any input gives a result; `docs/chat.md` lists the rules and the repairs.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any
from uuid import uuid4

from vllm_kimi_k3.chat.arguments import Schema, escape
from vllm_kimi_k3.chat.calls import CallWriter
from vllm_kimi_k3.chat.events import Arguments, Content, End, Event, Reasoning
from vllm_kimi_k3.chat.fallback import MarkerText
from vllm_kimi_k3.chat.pieces import Pieces, Utf8
from vllm_kimi_k3.chat.repairs import Repair, record
from vllm_kimi_k3.chat.tags import Header


class Mode(Enum):
    """Where in the message the parser stands."""

    THINK = "think"
    BETWEEN = "between"  # in the message, in no channel
    RESPONSE = "response"
    TOOLS = "tools"
    CALL = "call"
    ARGUMENT = "argument"
    DONE = "done"


_KINDS = {Mode.THINK: Reasoning, Mode.ARGUMENT: Arguments}
CALLING = (Mode.TOOLS, Mode.CALL, Mode.ARGUMENT)
_CHANNELS = ("message", "think", "response", "tools")
_VALUES = ("argument", "json")


def random_id() -> str:
    """A call id that no other call has, in any conversation."""
    return f"call_{uuid4().hex}"


class OutputParser:
    """Parses one generated message.

    Args:
        pieces: text of tokens, shared by all requests.
        start: where the prompt left off; `prompt.resume` reads it from the prompt's ids.
        schemas: `parameters` schema of each tool by name.
        new_id: makes call ids.
        on_repair: told of every repair.
        never_empty: deliver the reasoning as content too where the message has neither content nor calls.
    """

    def __init__(
        self,
        pieces: Pieces,
        start: Mode = Mode.THINK,
        schemas: Mapping[str, Schema] | None = None,
        new_id: Callable[[], str] = random_id,
        on_repair: Callable[[Repair], None] = record,
        never_empty: bool = False,
    ) -> None:
        self.pieces = pieces
        self._specials = pieces.specials
        self.ends = frozenset({self._specials.end_of_msg, self._specials.eot, self._specials.eos})
        self._repair = on_repair
        self._never_empty = never_empty
        self._utf8 = Utf8()
        self._events: list[Event] = []
        self._calls = CallWriter(self._events, schemas or {}, new_id, on_repair)
        self._run: list[str] = []  # pieces of the text event being collected
        self._blanks: list[str] = []  # blanks between channels, in case an answer follows them
        self._thoughts: list[str] = []
        self._spelled: MarkerText | None = None
        self._header: Header | None = None
        self._ignored: list[str] = []  # unknown elements that are open; their text is ignored
        self._orphan = False  # a response was closed inside think
        self._answered = False  # content that is not blank was delivered
        self._answer_over = False
        self._tools_seen = False
        self._dropped = False
        self.reasoning_tokens = 0
        self.mode = start
        self._listen()

    @property
    def reasoning(self) -> str:
        """All text of the think channel so far."""
        return "".join(self._thoughts)

    # Input

    def feed(self, ids: Iterable[int]) -> list[Event]:
        """Parse the next token ids; returns what became known through them."""
        pieces = self.pieces
        utf8 = self._utf8
        for token in ids:
            text = pieces[token]
            if text is None or utf8.partial:
                if token in self._specials:
                    if utf8.partial:
                        self._repair(Repair.BYTES_INVALID)
                        self._sink(utf8.flush())
                    self._special(token)
                    continue
                text = utf8.decode(pieces.bytes_of(token))
            self._sink(text)
        return self._take()

    def feed_text(self, text: str) -> list[Event]:
        """Parse text where there are no ids; markers in it count as structure."""
        if self._spelled is None:
            self._spelled = MarkerText(self._specials)
        for part in self._spelled.push(text):
            if isinstance(part, int):
                self._special(part)
            else:
                self._sink(part)
        return self._take()

    def feed_plain(self, text: str) -> list[Event]:
        """Parse ordinary text, whatever it spells."""
        self._sink(text)
        return self._take()

    def finish(self) -> list[Event]:
        """The output is over. Without an end of message it was cut: what is open stays incomplete."""
        if self._spelled is not None:
            self._sink(self._spelled.flush())
        cut = self.mode is not Mode.DONE
        if cut:
            if self._header is not None:
                self._repair(Repair.TAG_CUT)
                self._header = None
            if self._utf8.partial:
                self._repair(Repair.BYTES_CUT)
            if self.mode in (Mode.CALL, Mode.ARGUMENT):
                self._repair(Repair.CALL_CUT)
            self._flush()
            self._conclude()
            self.mode = Mode.DONE
            self._listen()
        events = self._take()
        events.append(End(cut))
        return events

    def continue_from(self, before: "OutputParser") -> None:
        """Stand where `before` stands, with nothing delivered yet."""
        self.mode = before.mode
        self._answer_over = before._answer_over
        self._tools_seen = before._tools_seen
        self._listen()

    # Text

    def _listen(self) -> None:
        """Choose where text goes in the present state, and what becomes of it."""
        self._kind: Any = _KINDS.get(self.mode, Content)
        self._sink: Callable[[str], object] = self._drop
        if self._header is not None:
            self._sink = self._header_text
        elif self._ignored:
            pass
        elif self.mode in (Mode.THINK, Mode.RESPONSE):
            self._sink = self._run.append
        elif self.mode is Mode.BETWEEN and not (self._answer_over or self._orphan or self._tools_seen):
            self._sink = self._text_between
        elif self.mode is Mode.ARGUMENT:
            self._sink = self._argument_text if self._calls.streaming else self._calls.buffer.append

    def _drop(self, text: str) -> None:
        """Text that belongs nowhere; counted once for each place, blanks not at all."""
        if not self._dropped and text.strip() and not self._ignored and self.mode is not Mode.DONE:
            self._dropped = True
            self._repair(Repair.TEXT_DROPPED)

    def _text_between(self, text: str) -> None:
        self._blanks.append(text)
        if text.strip():
            self._repair(Repair.RESPONSE_OPEN_INFERRED)
            self._run.extend(self._blanks)
            self._go(Mode.RESPONSE)

    def _argument_text(self, text: str) -> None:
        self._run.append(escape(text))

    def _header_text(self, text: str) -> None:
        assert self._header is not None
        if not self._header.push(text):
            self._repair(Repair.TAG_BROKEN)
            self._release(self._header)

    def _release(self, header: Header) -> None:
        """What followed a marker is no tag: it is text of the place where it stands."""
        self._header = None
        self._listen()
        self._sink(header.text)

    def _flush(self) -> None:
        """Turn the collected pieces into an event of the present mode."""
        run = self._run
        if not run:
            return
        text = run[0] if len(run) == 1 else "".join(run)
        kind = self._kind
        if kind is Reasoning:
            self.reasoning_tokens += len(run)
            self._thoughts.append(text)
        elif kind is Content and not self._answered:
            self._answered = bool(text) and not text.isspace()
        run.clear()
        if text:
            self._events.append(Arguments(self._calls.index, text) if kind is Arguments else kind(text))

    def _take(self) -> list[Event]:
        self._flush()
        events = self._events.copy()
        self._events.clear()
        return events

    # Structure

    def _special(self, token: int) -> None:
        specials = self._specials
        if self.mode is Mode.DONE:
            return
        if token in (specials.open, specials.close):
            self._interrupt()
            if self.mode is Mode.DONE:
                return
            self._header = Header(closing=token == specials.close)
            self._sink = self._header_text
        elif token == specials.sep:
            self._complete()
        elif token in self.ends:
            self._interrupt()
            self._end_message()
        else:
            self._repair(Repair.SPECIAL_DROPPED)

    def _complete(self) -> None:
        header = self._header
        if header is None:
            self._repair(Repair.TAG_STRAY)
            return
        tag = header.tag()
        if tag is None:
            self._repair(Repair.TAG_BROKEN)
            self._release(header)
            return
        self._header = None
        self._tag(header.closing, tag.name, tag.attributes)

    def _interrupt(self) -> None:
        """A marker or the end arrives where the separator of a tag was due."""
        header = self._header
        if header is None:
            return
        self._header = None
        tag = header.tag()
        if tag is not None and self._is_structure(tag.name):
            self._repair(Repair.SEP_MISSING)
            self._tag(header.closing, tag.name, tag.attributes)
        else:
            self._repair(Repair.TAG_BROKEN)
            self._listen()

    def _is_structure(self, name: str) -> bool:
        return (
            name in _CHANNELS
            or (name == "call" and self.mode in CALLING)
            or (name in _VALUES and self.mode in (Mode.CALL, Mode.ARGUMENT))
        )

    def _tag(self, closing: bool, name: str, attributes: Mapping[str, str]) -> None:
        self._flush()
        if not self._is_structure(name):
            self._unknown(closing, name)
            self._listen()
            return
        stray = not self._ignored
        self._ignored.clear()
        if self.mode is Mode.ARGUMENT:
            if not (closing and name in _VALUES):
                self._repair(Repair.ARGUMENT_CLOSE_INFERRED)
            self._calls.close_value()
            self.mode = Mode.CALL
            stray = False
        if self.mode is Mode.CALL and name not in _VALUES:
            if not (closing and name == "call"):
                self._repair(Repair.CALL_CLOSE_INFERRED)
            self._calls.end()
            self.mode = Mode.TOOLS
            stray = False
        (self._close if closing else self._open)(name, attributes, stray)
        self._listen()

    def _open(self, name: str, attributes: Mapping[str, str], stray: bool) -> None:
        if name == "message":
            self._repair(Repair.SECOND_MESSAGE)
            self._end_message()
        elif name in ("think", "response", "tools"):
            self._open_channel(name)
        elif name == "call":
            if self._calls.start(attributes):
                self._go(Mode.CALL)
            else:
                self._ignored.append(name)
        elif self._calls.open_json() if name == "json" else self._calls.open_argument(attributes):
            self._go(Mode.ARGUMENT)
        else:
            self._ignored.append(name)

    def _open_channel(self, name: str) -> None:
        """Go into a channel, which ends the one that is open."""
        if self.mode is Mode.THINK:
            self._repair(Repair.THINK_REPEATED if name == "think" else Repair.THINK_CLOSE_INFERRED)
        elif self.mode is Mode.RESPONSE:
            self._repair(Repair.RESPONSE_REPEATED if name == "response" else Repair.RESPONSE_CLOSE_INFERRED)
            self._answer_over = name == "tools"
        elif self.mode is Mode.TOOLS:
            self._repair(Repair.TOOLS_REPEATED if name == "tools" else Repair.TOOLS_CLOSE_INFERRED)
        if name == "think":
            self._go(Mode.THINK)
        elif name == "response" and not self._answer_over:
            self._go(Mode.RESPONSE)
        elif name == "tools" and (self.mode is Mode.TOOLS or not self._tools_seen):
            self._tools_seen = True
            self._go(Mode.TOOLS)
        else:
            self._repair(Repair.TOOLS_REPEATED if name == "tools" else Repair.RESPONSE_REPEATED)
            self._ignored.append(name)
            self._go(Mode.BETWEEN)

    def _close(self, name: str, attributes: Mapping[str, str], stray: bool) -> None:
        if name == "message":
            self._end_message()
        elif self.mode is Mode.THINK and name == "think":
            self._go(Mode.BETWEEN)
        elif self.mode is Mode.THINK and name == "response":
            self._repair(Repair.RESPONSE_CLOSE_ORPHAN)
            self._orphan = True
            self._go(Mode.BETWEEN)
        elif self.mode is Mode.RESPONSE and name == "response":
            self._answer_over = True
            self._go(Mode.BETWEEN)
        elif self.mode is Mode.TOOLS and name == "tools":
            self._go(Mode.BETWEEN)
        elif stray:
            self._repair(Repair.TAG_STRAY)

    def _unknown(self, closing: bool, name: str) -> None:
        """An element that means nothing here: its text is ignored until it closes or structure follows."""
        if not closing:
            self._repair(Repair.CALL_OUTSIDE_TOOLS if name == "call" else Repair.TAG_UNKNOWN)
            self._ignored.append(name)
        elif name in self._ignored:
            del self._ignored[self._ignored.index(name) :]
        else:
            self._repair(Repair.TAG_STRAY)

    def _go(self, mode: Mode) -> None:
        self.mode = mode
        self._dropped = False
        self._blanks.clear()
        self._listen()

    def _end_message(self) -> None:
        self._flush()
        self._ignored.clear()
        if self.mode is Mode.ARGUMENT:
            self._repair(Repair.ARGUMENT_CLOSE_INFERRED)
            self._calls.close_value()
            self.mode = Mode.CALL
        if self.mode is Mode.CALL:
            self._repair(Repair.CALL_CLOSE_INFERRED)
            self._calls.end()
        elif self.mode is Mode.THINK:
            self._repair(Repair.THINK_CLOSE_INFERRED)
        self._conclude()
        self._go(Mode.DONE)

    def _conclude(self) -> None:
        """Deliver the reasoning once more as content where it must have been the answer."""
        if self._answered or self._tools_seen or not (self._orphan or self._never_empty):
            return
        text = self.reasoning
        if text:
            self._repair(Repair.ANSWER_FROM_REASONING)
            self._events.append(Content(text))
