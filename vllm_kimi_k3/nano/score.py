"""The score card: the exam's questions to a served miniature, through the official client."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import openai

from vllm_kimi_k3.nano.exam import TARGETS, Question, Reply, questions, right

# Of an answer; the longest right one has about 200.
_MOST_TOKENS = 400


@dataclass(frozen=True)
class Score:
    """A row of the card: ``right`` of ``total`` answers, and the share that is wanted, from ``least`` to ``most``."""

    skill: str
    right: int
    total: int
    least: float
    most: float

    @property
    def passed(self) -> bool:
        return self.least <= self.right / self.total <= self.most


def score(
    url: str, count: int, at_once: int = 8, failed: Callable[[Question, Reply], None] | None = None
) -> Iterator[Score]:
    """Ask ``count`` questions a skill; a row follows when its skill is done.

    Args:
        url: of the server, without ``/v1``.
        at_once: requests in flight.
        failed: called with each answer that does not count.

    Raises:
        openai.OpenAIError: the server is not there or refuses a request.
    """
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(at_once) as pool:
        for skill, (least, most) in TARGETS.items():
            asked = questions(skill, count, seed=1)
            good = 0
            for question, reply in zip(asked, pool.map(lambda q: ask(client, model, q), asked), strict=True):
                counts = right(question, reply)
                good += counts
                if failed and not counts:
                    failed(question, reply)
            yield Score(skill, good, len(asked), least, most)


def ask(client: openai.OpenAI, model: str, question: Question) -> Reply:
    """The greedy answer to a question."""
    dialogue = question.dialogue
    effort = dialogue.style.effort
    request: dict[str, Any] = {
        "messages": [_as_sent(message) for message in dialogue.messages],
        "reasoning_effort": "none" if effort == "off" else effort,
        "temperature": 0,
        "max_tokens": _MOST_TOKENS,
    }
    if dialogue.tools:
        request["tools"] = dialogue.tools
    choice = client.chat.completions.create(model=model, **request).choices[0]
    message = choice.message
    reply = Reply(
        content=message.content or "",
        reasoning=getattr(message, "reasoning", None) or "",
        finished=choice.finish_reason in ("stop", "tool_calls"),
    )
    for call in message.tool_calls or ():
        assert call.type == "function"
        reply.calls.append((call.function.name, _parsed(call.function.arguments)))
    return reply


def _as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a client sends it: arguments as a JSON string."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    sent = [
        call | {"function": call["function"] | {"arguments": text}} for call, text in zip(calls, texts, strict=True)
    ]
    return message | {"tool_calls": sent}


def _parsed(arguments: str) -> Any:
    """Arguments, or their text where they are no JSON, which is never right."""
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return arguments


def as_line(row: Score) -> str:
    """A line of the table, under :data:`HEADING`."""
    wanted = f"at least {row.least:.1%}" if row.most == 1 else f"below {row.most:.0%}"
    verdict = "" if row.passed else "  <- not reached"
    return f"{row.skill:28} {row.right:6} {row.total:6} {row.right / row.total:8.1%}  {wanted}{verdict}"


HEADING = f"{'skill':28} {'right':>6} {'total':>6} {'share':>8}  wanted"


def as_json(rows: list[Score]) -> str:
    """The card as a JSON list."""
    return json.dumps([asdict(row) | {"passed": row.passed} for row in rows], indent=2)
