"""What the miniature learns from is true: sums add up, lists are sorted, arguments are the user's own words."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from vllm_kimi_k3.nano.tasks import kept, lists, numbers, recall, tools
from vllm_kimi_k3.nano.tasks.exchange import Exchange, Results, Scene, Style, Turn
from vllm_kimi_k3.nano.tasks.strings import spell
from vllm_kimi_k3.nano.toolbox import TOOLS

SEEDS = range(60)


def _scene(seed: int, effort: str = "max") -> Scene:
    return Scene(random.Random(seed), Style(effort))


def _only(exchange: Exchange) -> Turn:
    (turn,) = exchange.steps
    assert isinstance(turn, Turn)
    return turn


@pytest.mark.parametrize("maker", numbers.MAKERS)
def test_arithmetic_is_right_at_every_step(maker: Callable[[Scene], Exchange]) -> None:
    for seed in SEEDS:
        exchange = maker(_scene(seed))
        turn = _only(exchange)
        for side, result in re.findall(r"([\d+*-]+)=(-?\d+)", turn.reasoning):
            assert eval(side) == int(result), turn.reasoning
        asked = [int(n) for n in re.findall(r"\d+", exchange.user)]
        assert len(asked) == 2
        named = {int(n) for n in re.findall(r"\d+", turn.content)}
        a, b = asked
        assert named & {a + b, abs(a - b), a * b, max(a, b)}, exchange
        assert turn.key in turn.content


def test_columns_carry_and_borrow() -> None:
    assert numbers.sum_steps(95, 7) == "5+7=12. 9+0+1=10."
    assert numbers.difference_steps(100, 1) == "10-1=9. 10-0-1=9. 1-0-1=0."


def test_lists_are_right() -> None:
    for seed in SEEDS:
        exchange = lists.order(_scene(seed))
        assert _only(exchange).content == ", ".join(
            map(str, sorted(map(int, exchange.user.partition(": ")[2].split(", "))))
        )
        exchange = lists.backwards(_scene(seed))
        assert _only(exchange).content.split(", ")[::-1] == exchange.user.partition(": ")[2].split(", ")
        exchange = lists.count(_scene(seed))
        assert f" {len(exchange.user.partition(': ')[2].split(', '))} " in _only(exchange).content
        exchange = lists.extreme(_scene(seed))
        pick = max if "largest" in exchange.user else min
        assert f"is {pick(map(int, re.findall(r'[0-9]+', exchange.user)))}." in _only(exchange).content
        exchange = lists.position(_scene(seed))
        word = _only(exchange).content.split()[-1].strip(".")
        place = ("first", "second", "third", "fourth", "fifth", "sixth").index(exchange.user.split()[3])
        assert exchange.user.partition(": ")[2].split(", ")[place] == word


def _strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in _strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in _strings(item)]
    return [value] if isinstance(value, str) else []


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


@pytest.mark.parametrize("name", [*TOOLS, "made up"])
def test_calls_fit_their_tool_and_are_copied_from_the_user(name: str) -> None:
    for seed in SEEDS:
        scene = _scene(seed)
        scene.tools = [TOOLS.get(name) or tools.made_up(scene.rng)]
        function = scene.tools[0]["function"]
        exchange = tools.use(scene)
        calling, results, telling = exchange.steps
        assert isinstance(calling, Turn)
        assert isinstance(results, Results)
        assert isinstance(telling, Turn)
        assert len(calling.calls) == len(results.contents) > 0
        assert not calling.content
        for call in calling.calls:
            assert call.name == function["name"]
            assert list(call.arguments) == function["parameters"]["required"]
            for key, value in call.arguments.items():
                kind = function["parameters"]["properties"][key]["type"]
                assert isinstance(value, _TYPES[kind]), (key, value)
                assert isinstance(value, bool) == (kind == "boolean")
                # As it stands, or as JSON spells it inside of an object.
                assert all(text in exchange.user or spell(text)[1:-1] in exchange.user for text in _strings(value))
        # What is told is what the tools gave.
        for value in (v for content in results.contents for v in json.loads(content).values() if v is not True):
            assert str(value) in telling.content


def test_a_wish_without_a_tool_is_refused() -> None:
    for seed in SEEDS:
        scene = _scene(seed)
        scene.tools = [TOOLS["search"]]
        assert _only(tools.refuse(scene)).content == tools.NO_TOOL


def test_other_two_stand_in_the_thinking_only() -> None:
    for seed in SEEDS:
        scene = _scene(seed)
        first = _only(kept.name_three(scene))
        (_, rest, _) = scene.kept[0]
        assert all(word in first.reasoning for word in rest)
        assert not set(rest) & set(first.content.strip(".").split(", "))
        second = _only(kept.other_two(scene))
        assert second.content.endswith(f"are {rest[0]} and {rest[1]}.")
        assert not scene.kept


def test_dropped_thinking_is_admitted() -> None:
    scene = _scene(0)
    scene.forgets = True
    kept.name_three(scene)
    assert _only(kept.other_two(scene)).content == kept.GONE


def test_recalled_facts_were_stated() -> None:
    for seed in SEEDS:
        scene = _scene(seed)
        scene.room = 600
        said = recall.state(scene).user
        exchange = recall.document(scene)
        said += exchange.user
        assert _only(exchange).content in exchange.user
        assert _only(recall.known(scene)).content in said
        # Values of different owners must not be confused for one another by accident.
        assert all(recall.sentence(*fact) in said for fact in scene.facts.items())


def test_effort_decides_how_much_is_thought() -> None:
    for maker in (*numbers.MAKERS, *lists.MAKERS, kept.name_three):
        sizes = [len(_only(maker(_scene(3, effort))).reasoning) for effort in ("off", "low", "high", "max")]
        assert sizes[0] == 0
        assert sizes == sorted(set(sizes))
