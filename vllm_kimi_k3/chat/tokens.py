"""The special tokens of Kimi K3: 256 names that sit directly above the BPE ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

SPECIAL_COUNT = 256
K3_RANKS = 163_584

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END_OF_MSG = "<|end_of_msg|>"
MEDIA_BEGIN = "<|media_begin|>"
MEDIA_CONTENT = "<|media_content|>"
MEDIA_PAD = "<|media_pad|>"
MEDIA_END = "<|media_end|>"

# Not a special token: ordinary text that the released encoder swaps for an image. Here it is always plain text.
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"

_NAMED_OFFSETS: dict[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: END_OF_MSG,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}


def default_name(offset: int) -> str:
    """Name of the special token `offset` places above the last rank, as in K3's own vocabulary.

    The reserved names spell K3's id whatever the number of ranks, so that a smaller vocabulary has the same 256 names.
    """
    return _NAMED_OFFSETS.get(offset, f"<|reserved_token_{K3_RANKS + offset}|>")


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens of one vocabulary.

    `ranks` is the number of BPE ranks; ids `ranks` … `ranks + 255` are special. `names` maps each of them to its
    spelling, `ids` the other way round. K3 stops at `end_of_msg`; some stacks also stop at `eot`.
    """

    ranks: int
    names: Mapping[int, str]
    ids: Mapping[str, int] = field(init=False)
    bos: int = field(init=False)
    eos: int = field(init=False)
    end_of_msg: int = field(init=False)
    open: int = field(init=False)
    close: int = field(init=False)
    sep: int = field(init=False)
    eot: int = field(init=False)
    media_begin: int = field(init=False)
    media_content: int = field(init=False)
    media_end: int = field(init=False)
    media_pad: int = field(init=False)
    unk: int = field(init=False)
    pad: int = field(init=False)

    @classmethod
    def from_ranks(cls, ranks: int, added: Mapping[int, str] | None = None) -> "SpecialTokens":
        """Build the table for `ranks` BPE ranks.

        `added` gives spellings that win over K3's own (`added_tokens_decoder` of tokenizer_config.json).
        Raises ValueError for an id outside the 256, a spelling used twice, or a structural token that was renamed away.
        """
        names = {ranks + offset: default_name(offset) for offset in range(SPECIAL_COUNT)}
        for token_id, name in (added or {}).items():
            if token_id not in names:
                raise ValueError(
                    f"added token {name!r} has id {token_id}, outside {ranks}…{ranks + SPECIAL_COUNT - 1}: "
                    "tokenizer_config.json and tiktoken.model do not belong together"
                )
            names[token_id] = name
        return cls(ranks, names)

    def __post_init__(self) -> None:
        ids = {name: token_id for token_id, name in self.names.items()}
        if len(ids) != len(self.names):
            twice = sorted(name for token_id, name in self.names.items() if ids[name] != token_id)
            raise ValueError(f"special tokens spelled the same: {twice}; every id needs its own spelling")
        object.__setattr__(self, "ids", ids)
        for attribute, name in _ATTRIBUTES.items():
            if name not in ids:
                raise ValueError(f"the vocabulary lacks the special token {name!r}; K3's chat format needs it")
            object.__setattr__(self, attribute, ids[name])

    def __contains__(self, token_id: int) -> bool:
        return self.ranks <= token_id < self.ranks + SPECIAL_COUNT

    @property
    def vocab_size(self) -> int:
        """Ranks and special tokens together."""
        return self.ranks + SPECIAL_COUNT


_ATTRIBUTES: dict[str, str] = {
    "bos": "[BOS]",
    "eos": "[EOS]",
    "end_of_msg": END_OF_MSG,
    "open": OPEN,
    "close": CLOSE,
    "sep": SEP,
    "eot": "[EOT]",
    "media_begin": MEDIA_BEGIN,
    "media_content": MEDIA_CONTENT,
    "media_end": MEDIA_END,
    "media_pad": MEDIA_PAD,
    "unk": "[UNK]",
    "pad": "[PAD]",
}
