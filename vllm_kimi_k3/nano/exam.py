"""Questions with checkable answers, a row of the score card each, and the marking of replies."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_k3.nano.dialogue import Dialogue, append, next_exchange, start
from vllm_kimi_k3.nano.tasks import chat, kept, lists, numbers, pictures, recall, tools
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, Turn

EFFORTS = ("low", "high", "max")


@dataclass(frozen=True)
class Question:
    """A dialogue that waits for the assistant, and the message that is right; ``row`` is its line of the score card."""

    row: str
    dialogue: Dialogue
    expected: Turn


@dataclass
class Reply:
    """A message of the assistant as a client sees it.

    ``calls`` are names with parsed arguments; ``finished`` is false when the message was cut.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    finished: bool = True


#: row -> (at least, at most) share of right answers
TARGETS: dict[str, tuple[float, float]] = {
    "grammar": (0.995, 1.0),
    "tools": (0.95, 1.0),
    "tool results": (0.9, 1.0),
    "recall to 2,000": (0.95, 1.0),
    "recall at 4,000": (0.8, 1.0),
    "recall at 6,000": (0.0, 1.0),
    "other two, thinking kept": (0.9, 1.0),
    "other two, thinking dropped": (0.0, 0.3),
    "arithmetic": (0.9, 1.0),
    "lists": (0.9, 1.0),
    "pictures": (0.9, 1.0),
}


def right(question: Question, reply: Reply) -> bool:
    """Whether a reply counts."""
    expected = question.expected
    if not reply.finished:
        return False
    if question.row == "grammar":
        return _well_formed(question, reply)
    if expected.calls or reply.calls:
        return reply.calls == [(call.name, call.arguments) for call in expected.calls]
    # Whole words: "3 purple" is not in "3 purplent", nor 5 in 56.
    return re.search(rf"(?<!\w){re.escape(expected.key)}(?!\w)", reply.content) is not None


def _well_formed(question: Question, reply: Reply) -> bool:
    """Whether a finished reply has the channels that it should: thinking if it is on, an answer or calls with an
    object each, as many calls as are due. Which tool to call, and whether to, is another row's question."""
    due = len(question.expected.calls)
    calls = all(isinstance(arguments, dict) for _, arguments in reply.calls)
    number = not (due and reply.calls) or len(reply.calls) == due
    thinks = question.dialogue.style.effort != "off"
    return calls and number and bool(reply.content or reply.calls) and bool(reply.reasoning) == thinks


def questions(row: str, count: int, seed: int) -> list[Question]:
    """``count`` questions of a row; question n of a seed is always the same."""
    return [_MAKERS[row](row, random.Random(f"exam {row} {seed} {number}")) for number in range(count)]


def _ask(row: str, dialogue: Dialogue, exchange: Exchange, turn: int = 0) -> Question:
    """The question for the ``turn``-th message of the assistant in an exchange."""
    append(dialogue, exchange)
    expected = [step for step in exchange.steps if isinstance(step, Turn)]
    wanted = expected[turn]
    later = len(expected) - turn
    while later:
        later -= dialogue.messages.pop()["role"] == "assistant"
    return Question(row, dialogue, wanted)


def _opening(rng: random.Random, tools_most: int = 0, effort: str | None = None) -> tuple[Scene, Dialogue]:
    return start(rng, effort or rng.choice(EFFORTS), tools_most)


def _grammar(row: str, rng: random.Random) -> Question:
    scene, dialogue = _opening(rng, 4, rng.choice([*EFFORTS, "off"]))
    makers = [*chat.MAKERS, *lists.MAKERS, *(tools.MAKERS * 2 if scene.tools else ())]
    for _ in range(rng.randint(0, 2)):
        append(dialogue, next_exchange(scene)[0])
    return _ask(row, dialogue, rng.choice(makers)(scene))


def _with_tools(rng: random.Random) -> tuple[Scene, Dialogue]:
    while True:
        scene, dialogue = _opening(rng, 6)
        if len(scene.tools) > 1:
            return scene, dialogue


def _tools(row: str, rng: random.Random) -> Question:
    scene, dialogue = _with_tools(rng)
    return _ask(row, dialogue, rng.choice(tools.MAKERS)(scene))


def _results(row: str, rng: random.Random) -> Question:
    scene, dialogue = _with_tools(rng)
    return _ask(row, dialogue, tools.use(scene), turn=1)


def _recall(least: int, most: int) -> Callable[[str, random.Random], Question]:
    def make(row: str, rng: random.Random) -> Question:
        scene, dialogue = _opening(rng)
        # About 3.1 characters a token in this text, and 120 tokens before and after it.
        left = (rng.uniform(least, most) - 120) * 3.1
        makers: tuple[Callable[[Scene], Exchange], ...] = (recall.state, recall.document, *chat.MAKERS, *lists.MAKERS)
        long = rng.random() < 0.5
        while left > 0 or not scene.facts:
            scene.room = int(max(100, left if long else min(left, 900)))
            exchange = recall.document(scene) if long else rng.choice(makers)(scene)
            before = len(dialogue.messages)
            append(dialogue, exchange)
            left -= sum(len(m["content"]) + len(m.get("reasoning", "")) + 60 for m in dialogue.messages[before:])
        return _ask(row, dialogue, recall.known(scene))

    return make


def _other_two(forget: bool) -> Callable[[str, random.Random], Question]:
    def make(row: str, rng: random.Random) -> Question:
        scene, dialogue = _opening(rng)
        append(dialogue, kept.name_three(scene), forget)
        for _ in range(rng.randint(0, 2)):
            append(dialogue, rng.choice((*chat.MAKERS, *numbers.MAKERS))(scene))
        # The question is marked by the two that were thought of, dropped or not.
        return _ask(row, dialogue, kept.other_two(scene))

    return make


def _single(makers: tuple[Callable[[Scene], Exchange], ...]) -> Callable[[str, random.Random], Question]:
    def make(row: str, rng: random.Random) -> Question:
        scene, dialogue = _opening(rng)
        return _ask(row, dialogue, rng.choice(makers)(scene))

    return make


_MAKERS: dict[str, Callable[[str, random.Random], Question]] = {
    "grammar": _grammar,
    "tools": _tools,
    "tool results": _results,
    "recall to 2,000": _recall(200, 2000),
    "recall at 4,000": _recall(3400, 4000),
    "recall at 6,000": _recall(5400, 6000),
    "other two, thinking kept": _other_two(False),
    "other two, thinking dropped": _other_two(True),
    "arithmetic": _single(numbers.MAKERS),
    "lists": _single(lists.MAKERS),
    "pictures": _single((pictures.look,)),
}
