"""K3's tokenizer: tiktoken over `tiktoken.model`, and nothing else.

Text becomes ids in three steps: lone surrogates become U+FFFD, long text is cut at forced token boundaries, and each
piece goes through the split pattern and byte-pair merging. Special tokens are only made where the caller asks for it.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import tiktoken

from vllm_kimi_k3.chat.tokens import SpecialTokens

VOCABULARY_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# Nothing merges across a cut; both numbers are part of the format, since they decide which ids long text gets.
PIECE_CHARACTERS = 400_000
RUN_CHARACTERS = 25_000
_FRAGMENT_CHARACTERS = 64

SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# The look-behinds let a match start only where a run starts, which keeps the search linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{RUN_CHARACTERS + 1},}}|(?<!\s)\s{{{RUN_CHARACTERS + 1},}}")
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenizerFilesError(ValueError):
    """The tokenizer files of a checkpoint are missing or do not belong together."""


class K3Tokenizer:
    """Text to ids and back for one vocabulary. Immutable, safe to share between threads.

    Args:
        ranks: byte string of each BPE rank; ranks are 0 … len-1.
        special: ids of the 256 special tokens above them.
    """

    def __init__(self, ranks: dict[bytes, int], special: SpecialTokens) -> None:
        self.special = special
        self._encoding = tiktoken.Encoding(
            name="kimi-k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=dict(special.ids)
        )
        self._bytes: list[bytes] = [b""] * special.vocab_size
        for token, rank in ranks.items():
            self._bytes[rank] = token
        for token_id, name in special.names.items():
            self._bytes[token_id] = name.encode()
        longest_first = sorted(special.ids, key=len, reverse=True)
        self._special_spelling = re.compile("|".join(map(re.escape, longest_first)))
        self._fragments = lru_cache(maxsize=8192)(lambda text: tuple(self.encode(text)))

    def __reduce__(self) -> tuple[type["K3Tokenizer"], tuple[dict[bytes, int], SpecialTokens]]:
        ranks = {token: rank for rank, token in enumerate(self._bytes[: self.special.ranks])}
        return K3Tokenizer, (ranks, self.special)

    @classmethod
    def from_directory(cls, directory: Path) -> "K3Tokenizer":
        """Read `tiktoken.model` and, where present, the added tokens of `tokenizer_config.json`.

        Raises TokenizerFilesError naming the file, the line and what is wrong with it.
        """
        ranks = read_ranks(directory / VOCABULARY_FILE)
        config = directory / CONFIG_FILE
        added = read_added_tokens(config) if config.is_file() else {}
        try:
            return cls(ranks, SpecialTokens.from_ranks(len(ranks), added))
        except ValueError as error:
            raise TokenizerFilesError(f"{directory}: {error}") from error

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Token ids of `text`.

        With `allow_special` the spelling of a special token becomes that token; without it, it is ordinary text.
        Never raises for a `str`: a lone surrogate is encoded as U+FFFD. Time is linear in the length.
        """
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if not allow_special:
            return self._encode_ordinary(text)
        ids: list[int] = []
        end = 0
        for match in self._special_spelling.finditer(text):
            ids += self._encode_ordinary(text[end : match.start()])
            ids.append(self.special.ids[match.group()])
            end = match.end()
        return ids + self._encode_ordinary(text[end:])

    def encode_fragment(self, text: str) -> Sequence[int]:
        """Token ids of a tag, a key or an attribute value; the short ones come back in every message and are kept."""
        return self._fragments(text) if len(text) <= _FRAGMENT_CHARACTERS else self.encode(text)

    def decode(self, ids: Iterable[int], skip: frozenset[int] = frozenset()) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids in `skip` or unknown ones give nothing."""
        return self.decode_bytes(token_id for token_id in ids if token_id not in skip).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of `ids`; an id outside the vocabulary gives none."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, its spelling for a special one, nothing for an id outside the vocabulary."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    @cached_property
    def longest_token(self) -> int:
        """Most characters that one token can stand for."""
        return max(len(token.decode("utf-8", "replace")) for token in self._bytes)

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The tiktoken object below; grammar back-ends look for it."""
        return self._encoding

    def _encode_ordinary(self, text: str) -> list[int]:
        if len(text) <= RUN_CHARACTERS:
            return self._encoding.encode_ordinary(text)
        ids: list[int] = []
        for piece in cut(text):
            ids += self._encoding.encode_ordinary(piece)
        return ids


def cut(text: str) -> Iterator[str]:
    """Cut `text` into the pieces that are tokenised on their own; joined again they are `text`.

    First every 400,000 characters, then inside such a piece before the 25,001st character of a run of blanks or of
    non-blanks (`str.isspace`).
    """
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        begin = 0
        for run in _LONG_RUN.finditer(piece):
            for end in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                yield piece[begin:end]
                begin = end
        yield piece[begin:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Ranks of a `tiktoken.model`: one token a line, base64 and rank. Raises TokenizerFilesError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerFilesError(f"cannot read the vocabulary {path}: {error.strerror}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerFilesError(f"{path}:{number}: expected `base64 rank`, found {line[:80]!r}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise TokenizerFilesError(f"{path}: {len(ranks)} ranks, not 0, 1, 2 … without gaps; fetch the file again")
    return ranks


def read_added_tokens(path: Path) -> dict[int, str]:
    """Spelling of each id in `added_tokens_decoder` of a tokenizer_config.json. Raises TokenizerFilesError."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return {int(key): value["content"] for key, value in config.get("added_tokens_decoder", {}).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerFilesError(f"cannot read added_tokens_decoder of {path}: {error!r}") from error
