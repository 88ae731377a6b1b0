"""A vocabulary small enough to write down, and helpers that spell model output with it.

In `spell`, `<O>`, `<C>`, `<S>`, `<E>` stand for the special tokens; all else is ordinary text, also `<|open|>`.
"""

import re
from random import Random

import tiktoken

from vllm_kimi_k3.chat.events import Arguments, CallEnd, CallStart, Content, End, Event, Reasoning
from vllm_kimi_k3.chat.parser import Mode, OutputParser
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.repairs import Repair
from vllm_kimi_k3.chat.tokens import SpecialTokens

# Merges cut words, tags and characters (the first three bytes of an emoji) in odd places.
_MERGES = [
    *(b"th", b"in", b"thin", b"think", b"re", b"res", b"ponse", b"to", b"ool", b"all", b"arg", b"ument", b"call"),
    *(b" k", b"ey", b'="', b'" ', b"\n\n", b"  ", b"<|", b"|>", b"open", b'\\"', b"12", b"he"),
    *(b"\xf0\x9f", b"\xf0\x9f\x98", b"\xe2\x80", b"\xc3"),
]
RANKS = {bytes([b]): b for b in range(256)}
for _merge in _MERGES:
    RANKS.setdefault(_merge, len(RANKS))
SPECIALS = SpecialTokens.from_ranks(len(RANKS))
_BY_RANK = {rank: token for token, rank in RANKS.items()}
PIECES = Pieces(SPECIALS, _BY_RANK.__getitem__)
_encoding = tiktoken.Encoding("tiny", pat_str=r"\p{L}+|[^\p{L}]", mergeable_ranks=RANKS, special_tokens={})
_SHORT = {"<O>": SPECIALS.open, "<C>": SPECIALS.close, "<S>": SPECIALS.sep, "<E>": SPECIALS.end_of_msg}


def text_ids(text: str, random: Random | None = None) -> list[int]:
    """Ids of ordinary text; with `random`, cut into tokens in a random way that spells the same bytes."""
    if random is None:
        return _encoding.encode_ordinary(text)
    data, ids, at = text.encode(), [], 0
    while at < len(data):
        fits = [piece for piece in RANKS if data.startswith(piece, at)]
        piece = random.choice(fits)
        ids.append(RANKS[piece])
        at += len(piece)
    return ids


def spell(output: str, random: Random | None = None) -> list[int]:
    """Token ids of a model output written with the short markers."""
    ids: list[int] = []
    for part in re.split("(<[OCSE]>)", output):
        ids += [_SHORT[part]] if part in _SHORT else text_ids(part, random)
    return ids


class Result:
    """Events summed up: what a client ends up with."""

    def __init__(self, events: list[Event], repairs: list[Repair]) -> None:
        self.repairs = repairs
        self.reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        self.content = "".join(e.text for e in events if isinstance(e, Content))
        starts = [e for e in events if isinstance(e, CallStart)]
        self.names = [e.name for e in starts]
        self.ids = [e.id for e in starts]
        self.arguments = [
            "".join(e.text for e in events if isinstance(e, Arguments) and e.call == s.call) for s in starts
        ]
        self.complete = [any(isinstance(e, CallEnd) and e.call == s.call for e in events) for s in starts]
        ends = [e for e in events if isinstance(e, End)]
        assert len(ends) == 1 and events[-1] is ends[0]
        self.cut = ends[0].cut

    @property
    def calls(self) -> list[tuple[str, str]]:
        return list(zip(self.names, self.arguments, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Result) and vars(self) == vars(other)

    def __repr__(self) -> str:
        return repr(vars(self))


def run(ids: list[int], cuts: list[int] | None = None, start: Mode = Mode.THINK, **options) -> Result:
    """Parse `ids` in one piece, or in deltas of the given sizes (the last size repeats)."""
    repairs: list[Repair] = []
    numbers = iter(range(10**6))
    parser = OutputParser(PIECES, start, new_id=lambda: f"call_{next(numbers)}", on_repair=repairs.append, **options)
    sizes = list(cuts or [len(ids) or 1])
    events: list[Event] = []
    at = 0
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        events += parser.feed(ids[at : at + size])
        at += size
    events += parser.finish()
    return Result(events, repairs)
