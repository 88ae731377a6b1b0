"""Text in place of token ids: spelled markers are taken for the special tokens, as nothing else can tell them apart."""

import re

from vllm_kimi_k3.chat.tokens import CLOSE, END_OF_MSG, OPEN, SEP, SpecialTokens

_SURROGATE = re.compile("[\ud800-\udfff]")


class MarkerText:
    """Cuts text into ordinary text and special ids. A marker may be split over pieces of text."""

    def __init__(self, specials: SpecialTokens) -> None:
        self._ids = {name: specials.ids[name] for name in (OPEN, CLOSE, SEP, END_OF_MSG)}
        self._markers = re.compile("|".join(map(re.escape, self._ids)))
        self._held = ""

    def push(self, text: str) -> list[str | int]:
        """Text and ids that are certain now; an end of text that may become a marker is held back."""
        # Lone surrogates exist in Python strings only; nothing that is sent could carry them.
        text = self._held + _SURROGATE.sub("\ufffd", text)
        parts: list[str | int] = []
        start = 0
        for match in self._markers.finditer(text):
            if match.start() > start:
                parts.append(text[start : match.start()])
            parts.append(self._ids[match[0]])
            start = match.end()
        rest = text[start:]
        held = next((n for n in range(min(len(rest), 16), 0, -1) if self._may_begin(rest[-n:])), 0)
        self._held = rest[len(rest) - held :]
        if len(rest) > held:
            parts.append(rest[: len(rest) - held])
        return parts

    def flush(self) -> str:
        """The text that was held back: no marker after all."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, text: str) -> bool:
        return any(name.startswith(text) for name in self._ids)
