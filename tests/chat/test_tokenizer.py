import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_k3.chat.tokenizer import (
    PIECE_CHARACTERS,
    RUN_CHARACTERS,
    K3Tokenizer,
    TokenizerFilesError,
    cut,
    read_ranks,
)


def test_agrees_with_every_golden(k3: K3Tokenizer, shared: Path) -> None:
    with (shared / "data/tokenizer/cases.jsonl").open(encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) > 50
    wrong = [case["n"] for case in cases if k3.encode(case["text"]) != case["ids"]]
    assert wrong == []


def test_split_pattern_is_the_published_one(shared: Path) -> None:
    from vllm_kimi_k3.chat.tokenizer import SPLIT_PATTERN

    assert json.loads((shared / "data/tokenizer/special_tokens.json").read_text())["pattern"] == SPLIT_PATTERN


@pytest.mark.parametrize(
    "text",
    [
        " " * 10**6,
        "a" * 10**6,
        "\n" * 10**6,
        "中" * 10**6,
        (" " * 24_999 + "x") * 40,
        ("A" * 24_000 + "\u0301" * 900 + " ") * 40,
    ],
    ids=["spaces", "letters", "newlines", "han", "runs-just-short", "upper-then-marks"],
)
def test_a_million_characters_take_linear_time(k3: K3Tokenizer, text: str) -> None:
    # CPU time: other work on the machine is not this text's fault.
    start = time.process_time()
    ids = k3.encode(text, allow_special=True)
    assert time.process_time() - start < 2
    assert k3.decode(ids) == text


def test_special_spellings_are_text_unless_allowed(tiny: K3Tokenizer) -> None:
    for token_id, name in tiny.special.names.items():
        text = f"a{name}b"
        plain = tiny.encode(text)
        assert not any(part in tiny.special for part in plain)
        assert tiny.decode(plain) == text
        assert tiny.encode(text, allow_special=True) == [*tiny.encode("a"), token_id, *tiny.encode("b")]


def test_lone_surrogate_becomes_the_replacement_character(tiny: K3Tokenizer) -> None:
    assert tiny.encode("a\ud800b") == tiny.encode("a\ufffdb")
    assert tiny.encode("\ud83d\ude00") == tiny.encode("😀")


def test_decode_skips_what_it_is_told_and_what_it_does_not_know(tiny: K3Tokenizer) -> None:
    ids = [tiny.special.open, *tiny.encode("hello"), 10**9, -1]
    assert tiny.decode(ids) == "<|open|>hello"
    assert tiny.decode(ids, skip=frozenset({tiny.special.open})) == "hello"
    assert tiny.decode([0xF0, 0x9F]) == "\ufffd"


@given(st.text())
def test_any_text_survives(tiny: K3Tokenizer, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text
    assert tiny.decode(tiny.encode(text, allow_special=True)) == text


def cut_slowly(text: str) -> list[str]:
    """The cutting rule, character by character."""
    pieces = []
    for start in range(0, len(text), PIECE_CHARACTERS):
        current, run = "", 0
        for character in text[start : start + PIECE_CHARACTERS]:
            run = run + 1 if current and current[-1].isspace() == character.isspace() else 1
            if run > RUN_CHARACTERS:
                pieces.append(current)
                current, run = "", 1
            current += character
        pieces.append(current)
    return pieces


@pytest.mark.parametrize(
    "text",
    [
        "x" * RUN_CHARACTERS,
        "x" * (RUN_CHARACTERS + 1),
        "a b" + " " * (3 * RUN_CHARACTERS) + "c",
        "\x1c\x85\u2003 " * 10_000 + "\u200b" * 30_000,
        ("w " * 200_000) + "x" * 60_000,
    ],
    ids=["exact", "one-more", "three-runs", "odd-blanks", "across-pieces"],
)
def test_cut_equals_the_slow_rule(text: str) -> None:
    assert list(cut(text)) == cut_slowly(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"AA== 0\nnonsense\n", ":2: expected `base64 rank`, found b'nonsense'"),
        (b"AA== 0\nAQ== 2\n", "without gaps"),
    ],
    ids=["bad-line", "gap"],
)
def test_damaged_vocabulary_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(content)
    with pytest.raises(TokenizerFilesError, match=message):
        read_ranks(path)


def test_missing_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerFilesError, match=r"tiktoken\.model: No such file"):
        K3Tokenizer.from_directory(tmp_path)
