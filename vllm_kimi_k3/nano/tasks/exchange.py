"""The parts of a generated dialogue, and how much it thinks."""

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kimi_k3.nano.tasks.pictures import Picture


@dataclass(frozen=True)
class Call:
    """A tool call; ``arguments`` by name."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """One message of the assistant. ``key`` must occur in the answer for it to count as right."""

    reasoning: str
    content: str
    calls: tuple[Call, ...] = ()
    key: str = ""


@dataclass(frozen=True)
class Results:
    """What the tools of the turn before gave, in call order."""

    contents: tuple[str, ...]


@dataclass(frozen=True)
class Exchange:
    """A user's message, perhaps with a picture before its text, and all that follows until the next one."""

    skill: str
    user: str
    steps: tuple[Turn | Results, ...]
    picture: "Picture | None" = None


def answer(
    skill: str, user: str, reasoning: str, content: str, key: str = "", picture: "Picture | None" = None
) -> Exchange:
    """An exchange of one question and one answer."""
    return Exchange(skill, user, (Turn(reasoning, content, key=key),), picture)


@dataclass(frozen=True)
class Style:
    """How a dialogue thinks: ``low``, ``high``, ``max``, ``unset`` (the prompt names no effort) or ``off``."""

    effort: str

    def think(self, core: str, plan: str, check: str) -> str:
        """Thinking for an effort: the core always, a plan before it from high on, a check after it at max."""
        if self.effort == "off":
            return ""
        parts = [core]
        if self.effort != "low":
            parts.insert(0, plan)
        if self.effort == "max":
            parts.append(check)
        return " ".join(parts)


@dataclass
class Scene:
    """What a dialogue has established so far, for later exchanges to come back to.

    ``facts`` maps what is asked for to its value; ``kept`` holds, for each unnamed rest of a thought list, its kind,
    the members that were not named, and whether the thinking is still in the history.
    """

    rng: random.Random
    style: Style
    tools: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[tuple[str, str, str], str] = field(default_factory=dict)
    kept: list[tuple[str, tuple[str, ...], bool]] = field(default_factory=list)
    #: The client sends no thinking back.
    forgets: bool = False
    #: Room for the next user message, in characters.
    room: int = 400
