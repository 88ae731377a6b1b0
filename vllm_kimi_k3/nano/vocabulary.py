"""The miniature's vocabulary: a byte-pair trainer, the shipped ranks, and the tokenizer files of a checkpoint.

Merges never join letters with digits, marks or line ends, so a string that is copied between quotes, or from a line of
its own, keeps its tokens. Digits are never merged: a number is spelled.
"""

import base64
import json
from collections import Counter
from collections.abc import Iterable
from importlib import resources
from itertools import pairwise
from pathlib import Path

import regex

from vllm_kimi_k3.chat.tokens import CLOSE, OPEN, SEP, SpecialTokens

# One class of characters a token: letters with one space before them, or marks.
_MERGEABLE = regex.compile(r" ?[A-Za-z]+|[^\sA-Za-z0-9]+")


def train_ranks(texts: Iterable[str], ranks: int) -> list[bytes]:
    """Learn byte-pair tokens from ``texts``: the 256 bytes, then the most frequent pairs, ``ranks`` tokens in all.

    Pieces of text that occur once are left out: they are senseless letters. Ties go to the pair that sorts first, so
    the result depends on the texts alone.

    Raises:
        ValueError: the texts do not hold enough different pairs.
    """
    counts = Counter(piece for text in texts for piece in _MERGEABLE.findall(text))
    words = {tuple(bytes([b]) for b in word.encode()): count for word, count in counts.items() if count > 1}
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < ranks:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            raise ValueError(
                f"the texts give {len(tokens)} tokens, {ranks} are asked for: add words or lower the ranks"
            )
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        tokens.append(best[0] + best[1])
        words = {_join(word, best): count for word, count in words.items()}
    return tokens


def _join(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    joined: list[bytes] = []
    at = 0
    while at < len(word):
        if word[at : at + 2] == pair:
            joined.append(pair[0] + pair[1])
            at += 2
        else:
            joined.append(word[at])
            at += 1
    return tuple(joined)


def dump_ranks(tokens: list[bytes]) -> str:
    """tiktoken's file format: a token in base64 and its rank, a line each."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))


def shipped_ranks() -> bytes:
    """``tiktoken.model`` as it lies in the package."""
    return (resources.files("vllm_kimi_k3.nano") / "assets" / "tiktoken.model").read_bytes()


def write_tokenizer(out: Path) -> SpecialTokens:
    """Write ``tiktoken.model`` and ``tokenizer_config.json`` into ``out``; returns the ids of the special tokens."""
    model = shipped_ranks()
    special = SpecialTokens.from_ranks(len(model.splitlines()))
    (out / "tiktoken.model").write_bytes(model)
    config = {
        "added_tokens_decoder": {
            str(token_id): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                # The release marks these three as not special, so that decoding does not drop them.
                "special": name not in (OPEN, CLOSE, SEP),
            }
            for token_id, name in special.names.items()
        },
        "additional_special_tokens": [],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return special
