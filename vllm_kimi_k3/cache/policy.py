"""Where a KDA state is worth keeping, and which one goes first. Pure Python: numbers in, numbers out.

A boundary is a number of tokens from the start of a prompt, a multiple of the hash unit; the state there is what a
later request with the same first tokens can start from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

#: Where two special tokens lie above the BPE ranks; 256 ids above the ranks are special.
END_OF_MSG_OFFSET, OPEN_OFFSET, SPECIAL_COUNT = 2, 3, 256
#: A tag opens as ``<|open|>``, ``message``, `` role``, ``="``, value: the role's first token stands so far behind.
ROLE_OFFSET = 4
#: How many ends of messages before the last one are kept of one prompt.
MESSAGES_KEPT = 2
#: The ladder's first rung, in tokens; each further one is twice as high.
FIRST_RUNG = 512


class Kind(IntEnum):
    """Why a state is kept, the least valuable first. A boundary wanted for two reasons has the higher kind."""

    RUNG = 1
    MESSAGE = 2
    PROMPT = 3
    TURN = 4
    SYSTEM = 5
    FORK = 6


#: How likely a state of a kind is to be used at all, before anything is known about it. Prompt and turn ends take
#: nearly all reads of an agent's traffic, rungs a few percent of them.
_PRIOR = {
    Kind.RUNG: 0.05,
    Kind.MESSAGE: 0.2,
    Kind.PROMPT: 0.5,
    Kind.TURN: 1.0,
    Kind.SYSTEM: 2.0,
    Kind.FORK: 2.0,
}
#: What is left of that once a deeper state of the same conversation has taken over.
_SUPERSEDED = 0.1


@dataclass(frozen=True)
class Marks:
    """The ids that structure a prompt."""

    open: int
    end_of_msg: int

    @classmethod
    def of_vocabulary(cls, size: int) -> "Marks":
        """Of a vocabulary of that many ids, K3's 256 special ones last."""
        ranks = size - SPECIAL_COUNT
        return cls(ranks + OPEN_OFFSET, ranks + END_OF_MSG_OFFSET)


def floor_to(tokens: int, unit: int) -> int:
    """The last boundary at or before so many tokens."""
    return tokens // unit * unit


def message_ends(tokens: Sequence[int], marks: Marks, start: int = 0) -> Iterator[int]:
    """Token counts at which messages end, from the first one after ``start``."""
    index = start - 1
    while True:
        try:
            index = tokens.index(marks.end_of_msg, index + 1)
        except ValueError:
            return
        yield index + 1


def system_end(tokens: Sequence[int], marks: Marks) -> int:
    """Where the leading messages of one role end: the system and tools block, or a first user message; 0 if none.

    The first message's role names the block, so nothing has to know how a role is spelled in tokens.
    """

    def role(start: int) -> int | None:
        opens = start + ROLE_OFFSET < len(tokens) and tokens[start] == marks.open
        return tokens[start + ROLE_OFFSET] if opens else None

    first = role(0)
    end = 0
    if first is None:
        return 0
    for stop in message_ends(tokens, marks):
        end = stop
        if role(stop) != first:
            break
    return end


def rungs(start: int, stop: int, unit: int) -> Iterator[int]:
    """Boundaries of the ladder in (start, stop): powers of two, so a fork past the first finds one at half its way."""
    rung = max(FIRST_RUNG, unit)
    while rung < stop:
        if rung > start:
            yield floor_to(rung, unit)
        rung *= 2


def wanted(
    tokens: Sequence[int] | None, count: int, start: int, unit: int, marks: Marks, fork: int = 0, lookahead: int = 0
) -> dict[int, Kind]:
    """The boundaries of a prompt at which to keep a state, and why.

    Args:
        tokens: the prompt's ids, or None for a prompt of embeddings, whose structure is unknown.
        count: tokens of the prompt (with the output so far, for a request that resumes).
        start: tokens that came from the cache; only boundaries after it are given.
        unit: tokens of a hash unit.
        marks: the special ids.
        fork: where cached MLA rows of other requests end to match although no state is there, or 0.
        lookahead: tokens of a match that a speculator recomputes.

    Returns:
        boundary to kind, each a multiple of ``unit`` in (start, count - 1].
    """
    last = floor_to(count - 1 - lookahead, unit)
    found: dict[int, Kind] = {}

    def keep(tokens_before: int, kind: Kind) -> None:
        boundary = floor_to(tokens_before, unit)
        if start < boundary <= last:
            found[boundary] = max(kind, found.get(boundary, kind))

    for rung in rungs(start, last, unit):
        keep(rung, Kind.RUNG)
    keep(last, Kind.PROMPT)
    if tokens is not None:
        for end in list(message_ends(tokens, marks, start))[-MESSAGES_KEPT - 1 :]:
            keep(end, Kind.MESSAGE)
        keep(system_end(tokens, marks), Kind.SYSTEM)
    keep(fork, Kind.FORK)
    return found


def value(kind: Kind, gain: int, uses: int, superseded: bool) -> float:
    """Expected tokens of recomputation that keeping a state saves. All states have the same size.

    Args:
        kind: why it is kept.
        gain: tokens between it and the state before it.
        uses: how often it was restored.
        superseded: a request started from it, and left a deeper state of the same conversation.
    """
    prior = _PRIOR[kind] * (_SUPERSEDED if superseded else 1.0)
    # Two uses are a pattern; one is what a conversation does with every state once.
    return gain * (prior + max(uses - 1, 0))
