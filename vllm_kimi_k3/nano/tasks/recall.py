"""Facts that are stated somewhere and asked for later, in a document or across a conversation."""

import random

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer

SKILL = "recall"

# kind, owner, thing
Key = tuple[str, str, str]


def draw(rng: random.Random) -> tuple[Key, str]:
    """A fact: what it is about, and its value."""
    name = rng.choice(words.NAMES)
    kind = rng.choice(["code", "code", "place", "colour"])
    if kind == "code":
        return (kind, name, ""), f"{rng.randint(0, 9999):04}"
    thing = rng.choice(words.OBJECTS)
    return (kind, name, thing), rng.choice(words.PLACES if kind == "place" else words.COLOURS)


def sentence(key: Key, value: str) -> str:
    kind, name, thing = key
    if kind == "code":
        return f"The code of {name} is {value}."
    if kind == "place":
        return f"The {thing} of {name} is in the {value}."
    if kind == "name":
        return f"Your name is {value}."
    return f"The {thing} of {name} is {value}."


def question(key: Key) -> str:
    kind, name, thing = key
    if kind == "code":
        return f"What is the code of {name}?"
    if kind == "place":
        return f"Where is the {thing} of {name}?"
    if kind == "name":
        return "What is my name?"
    return f"Which colour is the {thing} of {name}?"


def filler(rng: random.Random) -> str:
    """A sentence that states nothing anyone asks for."""
    a, b = rng.choice(words.ADJECTIVES), rng.choice(words.PLACES)
    lines = [
        f"The {a} {rng.choice(words.ANIMALS)} sleeps near the {b}.",
        f"{rng.choice(words.NAMES)} carries a {a} {rng.choice(words.OBJECTS)} to the {b}.",
        f"On {rng.choice(words.WEEKDAYS)} it is {rng.choice(words.SKIES)} in {rng.choice(words.CITIES)}.",
        f"A {rng.choice(words.COLOURS)} {rng.choice(words.OBJECTS)} lies behind the {b}.",
        f"{rng.choice(words.NAMES)} and {rng.choice(words.NAMES)} eat a {rng.choice(words.FRUITS)}.",
        f"{rng.randint(2, 99)} people wait at the {b}.",
    ]
    return rng.choice(lines)


def _new_fact(scene: Scene) -> tuple[Key, str]:
    while True:
        key, value = draw(scene.rng)
        if key not in scene.facts:
            scene.facts[key] = value
            return key, value


def state(scene: Scene) -> Exchange:
    """The user tells something to remember."""
    facts = " ".join(sentence(*_new_fact(scene)) for _ in range(scene.rng.randint(1, 3)))
    user = scene.rng.choice([f"Remember this: {facts}", f"Please note: {facts}"])
    think = scene.style.think("To remember.", "The user tells me something.", "It may be asked later.")
    return answer(SKILL, user, think, "I will remember it.", "remember")


def document(scene: Scene) -> Exchange:
    """A text as long as there is room for, with facts at any place, and a question about one of them."""
    rng = scene.rng
    lines = []
    size = 0
    target = rng.uniform(0.3, 1.0) * scene.room
    while size < target:
        lines.append(filler(rng))
        size += len(lines[-1])
    facts = [_new_fact(scene) for _ in range(min(rng.randint(1, 6), len(lines)))]
    for fact in facts:
        lines.insert(rng.randrange(len(lines) + 1), sentence(*fact))
    asked, (think, content, value) = _answer(scene, rng.choice(facts))
    user = f"Read this text.\n{' '.join(lines)}\n{asked}"
    return answer(SKILL, user, think, content, value)


def ask(scene: Scene) -> Exchange:
    """A question about anything that was stated, now and then about nothing that was."""
    return unknown(scene) if not scene.facts or scene.rng.random() < 0.04 else known(scene)


def known(scene: Scene) -> Exchange:
    """A question about anything that was stated."""
    asked, (think, content, value) = _answer(scene, scene.rng.choice(list(scene.facts.items())))
    return answer(SKILL, asked, think, content, value)


def unknown(scene: Scene) -> Exchange:
    """A question whose answer was never stated."""
    key, _ = draw(scene.rng)
    while key in scene.facts:
        key, _ = draw(scene.rng)
    think = scene.style.think("Not stated.", "The user asks for a fact.", "I did not read it.")
    return answer(SKILL, question(key), think, "I do not know that.", "do not know")


def _answer(scene: Scene, fact: tuple[Key, str]) -> tuple[str, tuple[str, str, str]]:
    key, value = fact
    found = sentence(key, value)
    think = scene.style.think(found, "The user asks for a fact.", f"I read it: {value}.")
    return question(key), (think, found, value)


MAKERS = (state, state, document, ask, ask, ask)
