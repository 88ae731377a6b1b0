"""Text that must be copied exactly: notes, code, and JSON values."""

import json
import random
import string
from typing import Any

from vllm_kimi_k3.nano import words

_MARKS: tuple[str, ...] = (
    *";:!?-+*&<>|$#@%~=/\\",
    *("()", "[]", "{}", "...", "->", "==", "!=", "&&", "''"),
)


def plain(rng: random.Random, least: int = 2, most: int = 5) -> str:
    """A few words without any mark."""
    pools = (words.ADJECTIVES, words.OBJECTS, words.COLOURS, words.FRUITS, words.VERBS, words.PLACES)
    return " ".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(least, most)))


def scramble(rng: random.Random) -> str:
    """Letters and digits without any sense."""
    return "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(3, 8)))


def wild(rng: random.Random) -> str:
    """One line with quotes, braces, numbers, marks and senseless pieces."""
    return " ".join(_fragment(rng) for _ in range(rng.randint(2, 7)))


def _fragment(rng: random.Random) -> str:
    word = rng.choice(rng.choice((words.OBJECTS, words.IDENTIFIERS, words.NAMES, words.ADJECTIVES)))
    kind = rng.randrange(9)
    if kind == 0:
        return f'"{word}"'
    if kind == 1:
        return f"{{{word}}}"
    if kind == 2:
        return str(rng.randint(0, 9999))
    if kind == 3:
        return scramble(rng)
    if kind == 4:
        return rng.choice(_MARKS)
    if kind == 5:
        return f"{word}{rng.choice('.,;:!?')}"
    if kind == 6:
        return f'{{"{word}": {rng.randint(0, 99)}}}'
    if kind == 7:
        return f"{word}({rng.choice(words.IDENTIFIERS)})"
    return word


def code(rng: random.Random) -> str:
    """One to three lines of code."""
    name, other = rng.sample(words.IDENTIFIERS, 2)
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    lines = [
        f"{name} = {a} + {b}\nprint({name})",
        f"for {name} in range({a}):\n    print({name})",
        f'print("{plain(rng, 1, 3)}")',
        f"if {name} > {a}:\n    {other} = {b}",
        f'{name} = {{"{other}": [{a}, {b}]}}\nprint({name}["{other}"])',
        f"def {name}({other}):\n    return {other} * {a}",
        f"while {name} < {a}: {name} += {b}",
        f"{name}[{a}] = '{scramble(rng)}'",
    ]
    return rng.choice(lines)


def value(rng: random.Random, depth: int) -> Any:
    """A JSON value; objects and lists only while ``depth`` lasts."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 0:
        return rng.randint(-99, 9999)
    if kind == 1:
        return rng.randint(-99, 999) / 10
    if kind == 2:
        return rng.random() < 0.5
    if kind == 3:
        return None if rng.random() < 0.3 else rng.randint(0, 9)
    if kind in (4, 5):
        return plain(rng, 1, 2) if rng.random() < 0.7 else scramble(rng)
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return mapping(rng, depth - 1)


def mapping(rng: random.Random, depth: int) -> dict[str, Any]:
    """A JSON object of one to three members."""
    return {key: value(rng, depth) for key in rng.sample(words.IDENTIFIERS, rng.randint(1, 3))}


def spell(item: Any) -> str:
    """JSON as K3 spells arguments."""
    return json.dumps(item, ensure_ascii=False)


def listed(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
