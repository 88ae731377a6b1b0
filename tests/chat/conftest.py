import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.tokens import SpecialTokens


@pytest.fixture(scope="session")
def tiny() -> K3Tokenizer:
    """A vocabulary of the 256 bytes and a few merges, so that ordinary text has more than one token size."""
    merges = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b"ld", b"  ", b"    ", b"<|", b"|>"]
    ranks = {bytes([byte]): byte for byte in range(256)} | {token: 256 + i for i, token in enumerate(merges)}
    return K3Tokenizer(ranks, SpecialTokens.from_ranks(len(ranks)))


@pytest.fixture(scope="session")
def k3(shared: Path) -> K3Tokenizer:
    """K3's own vocabulary."""
    return K3Tokenizer.from_directory(shared / "data" / "tokenizer")


@pytest.fixture(scope="session")
def chat_cases(shared: Path) -> dict[str, dict[str, Any]]:
    """The rendering goldens by name."""
    return {case["name"]: case for case in read_lines(shared / "data" / "chat" / "cases.jsonl")}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
