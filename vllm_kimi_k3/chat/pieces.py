"""Token ids to text, a token at a time."""

import codecs
from collections.abc import Callable

from vllm_kimi_k3.chat.tokens import SpecialTokens


class Pieces(dict[int, str | None]):
    """Text of each ordinary token, filled as tokens are seen.

    None stands for a token that needs thought: a special one, or bytes that are not whole UTF-8 characters. One table
    serves all requests of a tokenizer. `token_bytes` gives the bytes of an ordinary token; an id outside the
    vocabulary has none.
    """

    def __init__(self, specials: SpecialTokens, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self.specials = specials
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> str | None:
        text: str | None = None
        if token_id not in self.specials:
            try:
                text = self.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                text = None
        self[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of an ordinary token, none for an id that the vocabulary does not have."""
        return self._token_bytes(token_id) if 0 <= token_id < self.specials.ranks else b""


class Utf8:
    """Decodes bytes cut anywhere; what is not UTF-8 becomes U+FFFD, as in a decoding of the whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.partial = False

    def decode(self, piece: bytes) -> str:
        """Whole characters that `piece` completes; the rest waits, and `partial` is set."""
        text = self._decoder.decode(piece)
        self.partial = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """U+FFFD for bytes that wait for a continuation that will not come, or nothing."""
        text = self._decoder.decode(b"", True)
        self._decoder.reset()
        self.partial = False
        return text
