"""Lists: order, count, position."""

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer

SKILL = "lists"
_PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")


def _items(scene: Scene, most: int) -> list[str]:
    pool = scene.rng.choice((words.OBJECTS, words.ANIMALS, words.FRUITS, words.COLOURS))
    return scene.rng.sample(pool, scene.rng.randint(3, most))


def order(scene: Scene) -> Exchange:
    numbers = scene.rng.sample(range(10, 100), scene.rng.randint(3, 5))
    result = ", ".join(map(str, sorted(numbers)))
    steps, rest = [], list(numbers)
    while len(rest) > 1:
        least = min(rest)
        rest.remove(least)
        steps.append(f"{least}; rest {' '.join(map(str, rest))}.")
    text = ", ".join(map(str, numbers))
    think = scene.style.think(" ".join(steps), "Take the least each time.", f"So {result}.")
    user = scene.rng.choice([f"Sort these numbers: {text}", f"Put in order: {text}"])
    return answer(SKILL, user, think, result, result)


def extreme(scene: Scene) -> Exchange:
    numbers = scene.rng.sample(range(10, 100), scene.rng.randint(3, 6))
    word, pick = scene.rng.choice([("largest", max), ("smallest", min)])
    best, steps = numbers[0], [str(numbers[0])]
    for number in numbers[1:]:
        best = pick(best, number)
        steps.append(f"{number}: {best}")
    think = scene.style.think(", ".join(steps) + ".", f"Find the {word}.", f"So {best}.")
    user = f"Which number is the {word}: {', '.join(map(str, numbers))}?"
    return answer(SKILL, user, think, f"The {word} is {best}.", f"is {best}.")


def backwards(scene: Scene) -> Exchange:
    items = _items(scene, 6)
    result = ", ".join(reversed(items))
    steps = " ".join(f"{number} {item}." for number, item in enumerate(items, 1))
    think = scene.style.think(steps, "Number the words.", "Then from the last to the first.")
    return answer(SKILL, f"Reverse this list: {', '.join(items)}", think, result, result)


def count(scene: Scene) -> Exchange:
    items = _items(scene, 9)
    steps = " ".join(f"{number} {item}." for number, item in enumerate(items, 1))
    think = scene.style.think(steps, "Count the words.", f"So {len(items)}.")
    user = f"How many words are in this list: {', '.join(items)}"
    return answer(SKILL, user, think, f"There are {len(items)} words.", f"are {len(items)} words")


def position(scene: Scene) -> Exchange:
    items = _items(scene, 6)
    index = scene.rng.randrange(len(items))
    steps = " ".join(f"{number} {item}." for number, item in enumerate(items[: index + 1], 1))
    think = scene.style.think(steps, f"Find the {_PLACES[index]} word.", f"So {items[index]}.")
    user = f"What is the {_PLACES[index]} word of this list: {', '.join(items)}"
    return answer(SKILL, user, think, f"The {_PLACES[index]} word is {items[index]}.", f"is {items[index]}.")


MAKERS = (order, extreme, backwards, count, position)
