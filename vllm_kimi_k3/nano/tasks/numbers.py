"""Arithmetic, worked column by column in the thinking channel."""

import random

from vllm_kimi_k3.nano import words
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Scene, answer

SKILL = "arithmetic"


def _number(rng: random.Random) -> int:
    return rng.randint(0, rng.choice([9, 99, 99, 999, 999]))


def sum_steps(a: int, b: int) -> str:
    """Columns from the right, with the carry as a third term."""
    steps, carry = [], 0
    for place in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x}+{y}{f'+{carry}' if carry else ''}={total}.")
        carry = total // 10
    return " ".join(steps)


def difference_steps(a: int, b: int) -> str:
    """Columns from the right for a >= b; a column that is too small borrows ten."""
    steps, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        low = x - borrow < y
        steps.append(f"{x + 10 * low}-{y}{'-1' if borrow else ''}={x + 10 * low - y - borrow}.")
        borrow = int(low)
    return " ".join(steps)


def add(scene: Scene) -> Exchange:
    a, b = _number(scene.rng), _number(scene.rng)
    total = a + b
    think = scene.style.think(sum_steps(a, b), f"Add {a} and {b}.", f"So {a}+{b}={total}.")
    user = scene.rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}.", f"{a} + {b} = ?"])
    return answer(SKILL, user, think, f"{a} + {b} = {total}", f"= {total}")


def subtract(scene: Scene) -> Exchange:
    b, a = sorted((_number(scene.rng), _number(scene.rng)))
    rest = a - b
    think = scene.style.think(difference_steps(a, b), f"Take {b} from {a}.", f"So {a}-{b}={rest}.")
    user = scene.rng.choice([f"What is {a} - {b}?", f"Take {b} from {a}.", f"{a} - {b} = ?"])
    return answer(SKILL, user, think, f"{a} - {b} = {rest}", f"= {rest}")


def multiply(scene: Scene) -> Exchange:
    a, b = scene.rng.randint(2, 99), scene.rng.randint(2, 9)
    tens, ones = a // 10, a % 10
    steps = f"{ones}*{b}={ones * b}."
    if tens:
        steps += f" {tens}*{b}={tens * b}. {sum_steps(tens * b * 10, ones * b)}"
    think = scene.style.think(steps, f"Multiply {a} by {b}.", f"So {a}*{b}={a * b}.")
    user = scene.rng.choice([f"What is {a} * {b}?", f"Multiply {a} by {b}.", f"{a} * {b} = ?"])
    return answer(SKILL, user, think, f"{a} * {b} = {a * b}", f"= {a * b}")


def larger(scene: Scene) -> Exchange:
    a, b = scene.rng.sample(range(10, 1000), 2)
    think = scene.style.think(f"{max(a, b)}>{min(a, b)}.", f"Compare {a} and {b}.", f"So {max(a, b)} is larger.")
    return answer(SKILL, f"Which is larger, {a} or {b}?", think, f"{max(a, b)} is larger.", f"{max(a, b)} is larger")


def story(scene: Scene) -> Exchange:
    name, things = scene.rng.choice(words.NAMES), scene.rng.choice(words.THINGS)
    a, b = scene.rng.randint(10, 99), scene.rng.randint(2, 99)
    if scene.rng.random() < 0.5:
        total, steps, verb = a + b, sum_steps(a, b), "buys"
    else:
        a, b = max(a, b), min(a, b)
        total, steps, verb = a - b, difference_steps(a, b), "sells"
    user = f"{name} has {a} {things} and {verb} {b}. How many {things} has {name} now?"
    think = scene.style.think(steps, f"{name} {verb} {b}.", f"So {total}.")
    return answer(SKILL, user, think, f"{name} has {total} {things} now.", f"has {total} {things}")


MAKERS = (add, add, subtract, subtract, multiply, multiply, larger, story)
