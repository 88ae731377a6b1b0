import json
from pathlib import Path

import pytest

from vllm_kimi_k3.chat.tokens import K3_RANKS, SpecialTokens


def test_table_equals_the_published_one(shared: Path) -> None:
    published = json.loads((shared / "data/tokenizer/special_tokens.json").read_text())
    table = SpecialTokens.from_ranks(K3_RANKS)
    assert dict(table.names) == {int(k): v for k, v in published["names"].items()}
    assert table.vocab_size == published["size"]
    assert (table.bos, table.eos, table.pad, table.unk) == (
        163584,
        163585,
        163839,
        163838,
    )
    assert (table.end_of_msg, table.open, table.close, table.sep) == (
        163586,
        163587,
        163588,
        163589,
    )
    assert (
        table.media_begin,
        table.media_content,
        table.media_end,
        table.media_pad,
    ) == (163602, 163603, 163604, 163605)


def test_small_vocabulary_keeps_offsets() -> None:
    table = SpecialTokens.from_ranks(1000)
    assert (table.end_of_msg, table.open, table.pad) == (1002, 1003, 1255)
    assert 1000 in table and 1255 in table and 999 not in table and 1256 not in table


def test_configured_names_win() -> None:
    assert SpecialTokens.from_ranks(1000, {1008: "<|mine|>"}).ids["<|mine|>"] == 1008


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ({2000: "<|x|>"}, "outside 1000"),
        ({1008: "<|open|>"}, "spelled the same"),
        ({1003: "<|begin|>"}, "lacks the special token '<|open|>'"),
    ],
    ids=["outside", "twice", "renamed"],
)
def test_a_vocabulary_that_does_not_fit_is_refused(added: dict[int, str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        SpecialTokens.from_ranks(1000, added)
