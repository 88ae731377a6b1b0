"""Five are thought of, three are named; the other two are known only from the thinking kept in the history."""

from collections.abc import Sequence

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer

SKILL = "kept thinking"
GONE = "I do not know them any more."

_KINDS: dict[str, Sequence[str]] = {
    "numbers": [str(number) for number in range(10, 100)],
    "animals": words.ANIMALS,
    "fruits": words.FRUITS,
    "cities": words.CITIES,
    "colours": words.COLOURS,
    "names": words.NAMES,
}


def name_three(scene: Scene) -> Exchange:
    """The first half. Without thinking there is nothing to keep, and the thing is only named."""
    rng = scene.rng
    kind = "numbers" if rng.random() < 0.6 else rng.choice(list(_KINDS))
    five = rng.sample(_KINDS[kind], 5)
    # "The other two" means the latest list of a kind.
    scene.kept = [entry for entry in scene.kept if entry[0] != kind]
    if scene.style.effort != "off":
        scene.kept.append((kind, tuple(five[3:]), not scene.forgets))
    think = scene.style.think(
        f"Five {kind}: {', '.join(five)}.", f"I think of five {kind}.", f"I keep {five[3]} and {five[4]} to myself."
    )
    user = rng.choice(
        [f"Think of five {kind} and name three of them.", f"Think of five {kind}, but tell me only three."]
    )
    named = ", ".join(five[:3])
    return answer(SKILL, user, think, f"{named}.", named)


def other_two(scene: Scene) -> Exchange:
    """The second half, about a list that is still open."""
    kind, rest, there = scene.kept.pop(scene.rng.randrange(len(scene.kept)))
    user = scene.rng.choice([f"What are the other two {kind}?", f"Which two {kind} did you not name?"])
    if not there:
        think = scene.style.think("They are gone.", "I look for my thinking.", "It is not there.")
        return answer(SKILL, user, think, GONE, GONE)
    pair = f"{rest[0]} and {rest[1]}"
    think = scene.style.think(f"The other two: {pair}.", "I look at my thinking.", f"I did not name {pair}.")
    return answer(SKILL, user, think, f"The other two {kind} are {pair}.", pair)
