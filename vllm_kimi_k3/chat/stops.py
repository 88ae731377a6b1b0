"""Stop strings cut the text that vLLM hands out, but not the ids; here the ids follow the text."""

from collections import deque
from collections.abc import Sequence

from vllm_kimi_k3.chat.events import Event
from vllm_kimi_k3.chat.parser import OutputParser
from vllm_kimi_k3.chat.pieces import Pieces, Utf8


class StopGate:
    """Lets ids pass once vLLM has released their text, so that a stop string never shows.

    vLLM holds back as many characters as could still become a stop string and, when one was found, cuts the text
    there. Counting characters against the released text needs special tokens spelled in it.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._utf8 = Utf8()
        self._waiting: deque[tuple[int, str]] = deque()
        self._room = 0

    def feed(self, parser: OutputParser, ids: Sequence[int], text: str, finished: bool) -> list[Event]:
        """Give `parser` the ids whose text is out; with `finished` also the released part of the next one."""
        self._room += len(text)
        self._waiting.extend((token, self._spelling(token)) for token in ids)
        passed: list[int] = []
        while self._waiting and len(self._waiting[0][1]) <= self._room:
            token, spelled = self._waiting.popleft()
            self._room -= len(spelled)
            passed.append(token)
        events = parser.feed(passed)
        if finished and self._waiting:
            token, spelled = self._waiting[0]
            if token in parser.ends:
                # vLLM leaves the token that ended the message out of the text.
                events += parser.feed([token])
            elif token not in self._pieces.specials:
                events += parser.feed_plain(spelled[: self._room])
        return events

    def _spelling(self, token: int) -> str:
        specials = self._pieces.specials
        if token in specials:
            return self._utf8.flush() + specials.names[token]
        return self._utf8.decode(self._pieces.bytes_of(token))
