"""Whole generated dialogues: exchanges of all skills in a row, as messages and as token ids with a loss mask."""

import base64
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kimi_k3.chat.effort import Thinking
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.request import ChatRequest, ImageSlot
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.nano.tasks import chat, kept, lists, numbers, recall, tools
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Results, Scene, Style, Turn
from vllm_kimi_k3.nano.tasks.pictures import Picture

Message = dict[str, Any]

_SYSTEM = (
    "You are Nano.",
    "You are Nano, a helpful assistant.",
    "You are a helpful assistant.",
    "Answer in short sentences.",
    "You are Nano. You help with small tasks and use tools when they fit.",
)
#: skill -> weight of its exchanges in a dialogue
WEIGHTS = {"grammar": 1.5, "tools": 3.0, "recall": 2.5, "kept": 1.5, "numbers": 1.5, "lists": 1.0}
# Mean characters a token, on the low side, and the tokens that a message costs beside its text.
_CHARACTERS, _FRAME = 2.9, 22


@dataclass
class Dialogue:
    """Messages, which of the assistant's are examples to learn from, and the pictures in them, both in order."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    style: Style
    learned: list[bool]
    pictures: list[Picture] = field(default_factory=list)

    def request(self, generation: bool = False) -> ChatRequest:
        """What the renderer takes; with ``generation`` the assistant's next turn is opened."""
        return ChatRequest(
            messages=self.messages,
            tools=self.tools,
            thinking=thinking(self.style),
            add_generation_prompt=generation,
            images=[_slot(picture) for picture in self.pictures],
        )


def _slot(picture: Picture) -> ImageSlot:
    size = picture.image().size
    return ImageSlot(*size, ImageRules().fit(*size).tokens)


def thinking(style: Style) -> Thinking:
    """The request's thinking for a style."""
    return Thinking(style.effort != "off", style.effort if style.effort in ("low", "high", "max") else None)


def start(rng: random.Random, effort: str, most_tools: int) -> tuple[Scene, Dialogue]:
    """A scene and its dialogue so far: perhaps a system message, perhaps tools."""
    scene = Scene(rng, Style(effort))
    if most_tools and rng.random() < 0.6:
        scene.tools = tools.declare(rng, most_tools)
    dialogue = Dialogue([], scene.tools, scene.style, [])
    if rng.random() < 0.5:
        content = rng.choice(_SYSTEM)
        if rng.random() < 0.3:
            key, value = recall.draw(rng)
            scene.facts[key] = value
            content += f" {recall.sentence(key, value)}"
        dialogue.messages.append({"role": "system", "content": content})
    return scene, dialogue


def append(dialogue: Dialogue, exchange: Exchange, forget: bool = False) -> None:
    """Add the messages of an exchange. ``forget`` drops its thinking, and then it is no example to learn from."""
    messages = dialogue.messages
    content: str | list[dict[str, Any]] = exchange.user
    if exchange.picture is not None:
        dialogue.pictures.append(exchange.picture)
        data = base64.b64encode(exchange.picture.png()).decode()
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        content = [image, {"type": "text", "text": exchange.user}] if exchange.user else [image]
    messages.append({"role": "user", "content": content})
    calls: list[str] = []
    for step in exchange.steps:
        if isinstance(step, Results):
            messages += (
                {"role": "tool", "tool_call_id": call, "content": content}
                for call, content in zip(calls, step.contents, strict=True)
            )
            continue
        message, calls = spell_turn(step, len(messages))
        if forget:
            message["reasoning"] = ""
        messages.append(message)
        dialogue.learned.append(not forget)


def spell_turn(turn: Turn, number: int) -> tuple[Message, list[str]]:
    """The assistant's message for a turn, and the ids of its calls, made from ``number``."""
    ids = [f"call_{number}_{index}" for index in range(len(turn.calls))]
    message: Message = {"role": "assistant", "content": turn.content, "reasoning": turn.reasoning}
    if turn.calls:
        message["tool_calls"] = [
            {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for name, call in zip(ids, turn.calls, strict=True)
        ]
    return message, ids


def next_exchange(scene: Scene) -> tuple[Exchange, bool]:
    """Draw an exchange that fits the scene, and whether its thinking is dropped from the history."""
    rng = scene.rng
    weights = dict(WEIGHTS)
    if not scene.tools:
        del weights["tools"]
    if scene.kept and rng.random() < 0.4:
        return kept.other_two(scene), False
    skill = rng.choices(list(weights), list(weights.values()))[0]
    if skill == "kept":
        exchange = kept.name_three(scene)
        forget = bool(scene.kept) and rng.random() < 0.15
        if forget:
            kind, rest, _ = scene.kept.pop()
            scene.kept.append((kind, rest, False))
        return exchange, forget
    makers: dict[str, Sequence[Callable[[Scene], Exchange]]] = {
        "grammar": chat.MAKERS,
        "tools": tools.MAKERS,
        "recall": recall.MAKERS,
        "numbers": numbers.MAKERS,
        "lists": lists.MAKERS,
    }
    return rng.choice(makers[skill])(scene), False


def converse(rng: random.Random, limit: int) -> Dialogue:
    """A dialogue of about ``limit`` tokens at most."""
    effort = rng.choices(["low", "high", "max", "unset", "off"], [25, 20, 40, 5, 10])[0]
    scene, dialogue = start(rng, effort, min(6, limit // 160))
    scene.forgets = limit <= 1024 and rng.random() < 0.08
    left = (limit - 90 - 90 * len(scene.tools)) * _CHARACTERS
    while left > 150 or not dialogue.learned:
        scene.room = int(max(60, left - 250))
        exchange, forget = next_exchange(scene)
        before = len(dialogue.messages)
        append(dialogue, exchange, forget)
        left -= sum(_cost(message) for message in dialogue.messages[before:])
    if scene.forgets:
        turns = [message for message in dialogue.messages if message["role"] == "assistant"]
        for message in turns[:-1]:
            message["reasoning"] = ""
        dialogue.learned = [False] * (len(turns) - 1) + [dialogue.learned[-1]]
    return dialogue


def _cost(message: Message) -> float:
    """Estimate of a message's length in characters."""
    calls = message.get("tool_calls", ())
    size = len(message["content"]) + len(message.get("reasoning", ""))
    return size + sum(len(str(call["function"]["arguments"])) + 60 for call in calls) + _FRAME * _CHARACTERS


class Encoder:
    """Dialogues to token ids and a loss mask.

    Args:
        tokenizer: of the miniature.
    """

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = tokenizer.special
        opened = render(tokenizer, ChatRequest([{"role": "user", "content": ""}], thinking=Thinking(False, None)))
        closed = render(
            tokenizer,
            ChatRequest([{"role": "user", "content": ""}], thinking=Thinking(False, None), add_generation_prompt=False),
        )
        # The opener of the assistant's message and of its first channel, which the prompt holds and the model never
        # writes: <|open|>message role="assistant"<|sep|> and then <|open|>NAME<|sep|>.
        opener = opened[len(closed) :]
        self._header = opener[: opener.index(self.special.sep) + 1]

    def encode(self, dialogue: Dialogue) -> tuple[list[int], list[int]]:
        """Token ids, and for each 1 where the assistant wrote it and it is to be learned, else 0."""
        ids = render(self.tokenizer, dialogue.request())
        mask = [0] * len(ids)
        size, at = len(self._header), 0
        for learned in dialogue.learned:
            while ids[at : at + size] != self._header:
                at = ids.index(self.special.open, at + 1)
            begin = ids.index(self.special.sep, at + size) + 1
            at = ids.index(self.special.end_of_msg, begin)
            if learned:
                mask[begin : at + 1] = [1] * (at + 1 - begin)
        return ids, mask
