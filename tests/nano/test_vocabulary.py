"""The byte-pair trainer and the shipped vocabulary."""

import re

import pytest
from tiktoken.load import load_tiktoken_bpe

from vllm_kimi_k3.nano.vocabulary import dump_ranks, shipped_ranks, train_ranks


def test_most_frequent_pair_first() -> None:
    assert train_ranks(["abab abab ab ab cd"] * 2, 258)[256:] == [b"ab", b" ab"]


def test_letters_do_not_merge_with_marks_or_digits() -> None:
    tokens = train_ranks(['"word" x1 x1 x1 {"word": 12} {"word": 12}'] * 3, 262)
    assert all(re.fullmatch(rb" ?[A-Za-z]+|[^\sA-Za-z0-9]+", token) for token in tokens[256:])


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="261 tokens, 300 are asked for"):
        train_ranks(["abab ab cd"] * 2, 300)


def test_shipped_file_reads_as_tiktoken(tmp_path) -> None:
    file = tmp_path / "tiktoken.model"
    file.write_bytes(shipped_ranks())
    ranks = load_tiktoken_bpe(str(file))
    assert sorted(ranks.values()) == list(range(1024))
    assert all(bytes([b]) in ranks for b in range(256))
    assert dump_ranks(sorted(ranks, key=ranks.__getitem__)).encode() == shipped_ranks()
