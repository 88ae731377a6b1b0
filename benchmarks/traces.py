"""Generated traffic: whom an endpoint's prefix cache meets. The same arguments give the same requests.

Requests are listed in the order of their arrival. A reply is as many tokens 1 as were asked for, which is what a
simulation without a model answers, so a conversation's next prompt is known beforehand.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_kimi_k3.cache.policy import Marks

_SYSTEM, _USER, _ASSISTANT, _TOOL = 11, 12, 13, 14
_WORDS = range(20, 900)
#: A conversation that would grow beyond this ends.
LONGEST = 40_000


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        prompt: token ids.
        new: tokens of the reply.
        after: index of the request that must be answered first, or None.
    """

    prompt: list[int]
    new: int
    after: int | None


@dataclass
class _Session:
    history: list[int]
    turns: int
    last: int | None = None
    #: lengths of the history before each turn
    turned: list[int] = field(default_factory=list)


class _Writer:
    """Writes messages as the chat format spells them."""

    def __init__(self, seed: int, marks: Marks) -> None:
        self.random = random.Random(seed)
        self.marks = marks

    def message(self, role: int, tokens: int) -> list[int]:
        body = self.random.choices(_WORDS, k=max(tokens - 6, 1))
        return [self.marks.open, 1, 2, 3, role, *body, self.marks.end_of_msg]

    def opener(self) -> list[int]:
        return [self.marks.open, 1, 2, 3, _ASSISTANT]

    def between(self, low: int, high: int) -> int:
        """A length, uniform in its logarithm: short ones are common."""
        return round(math.exp(self.random.uniform(math.log(low), math.log(high))))

    def turns(self, mean: float) -> int:
        """Turns of a conversation, geometric."""
        return 1 + int(self.random.expovariate(1 / (mean - 0.5)))


def agents(requests: int, marks: Marks, *, seed: int = 1, active: int = 8) -> list[Ask]:
    """Coding agents: 8,000 tokens of system and tools shared by all, tool results of 500 to 4,000 tokens, replies of 60
    to 400; of ten turns one goes back to an earlier point or is sent again.

    Args:
        requests: how many.
        marks: the ids that structure a prompt.
        seed: of everything drawn.
        active: sessions that are open at a time; the next request comes from any of them.
    """
    writer = _Writer(seed, marks)
    system = writer.message(_SYSTEM, 8_000)

    def start() -> _Session:
        return _Session(system + writer.message(_USER, writer.between(100, 1_000)), writer.turns(8))

    def go_on(session: _Session) -> None:
        if session.turned and writer.random.random() < 0.05:
            del session.history[writer.random.choice(session.turned) :]
        session.turned.append(len(session.history))
        session.history += writer.message(_TOOL, writer.between(500, 4_000))

    return _interleave(requests, writer, active, start, go_on, (60, 400), again=0.05)


def chats(requests: int, marks: Marks, *, seed: int = 2, active: int = 24) -> list[Ask]:
    """People who chat: 400 tokens of system prompt shared by all, messages of 20 to 1,500 tokens, replies of 60 to 600.

    Args: as of :func:`agents`.
    """
    writer = _Writer(seed, marks)
    system = writer.message(_SYSTEM, 400)

    def start() -> _Session:
        return _Session(system + writer.message(_USER, writer.between(20, 1_500)), writer.turns(5))

    def go_on(session: _Session) -> None:
        session.history += writer.message(_USER, writer.between(20, 1_500))

    return _interleave(requests, writer, active, start, go_on, (60, 600), again=0.03)


def _interleave(
    requests: int,
    writer: _Writer,
    active: int,
    start: Callable[[], _Session],
    go_on: Callable[[_Session], None],
    replies: tuple[int, int],
    again: float,
) -> list[Ask]:
    """Requests of sessions that take turns at random; one that ends is replaced. A share ``again`` is sent twice."""
    asks: list[Ask] = []
    sessions = [start() for _ in range(active)]
    while len(asks) < requests:
        place = writer.random.randrange(active)
        session = sessions[place]
        prompt, new = session.history + writer.opener(), writer.between(*replies)
        for _ in range(1 + (writer.random.random() < again)):
            asks.append(Ask(prompt, new, session.last))
            session.last = len(asks) - 1
        session.history = [*prompt, *[1] * new, writer.marks.end_of_msg]
        session.turns -= 1
        if session.turns <= 0 or len(session.history) > LONGEST:
            sessions[place] = start()
        else:
            go_on(session)
    return asks[:requests]
