"""What became of prompts, and what the cache says of itself."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.geometry import BLOCK_BYTES, UNIT
from tests.cache.test_guard import book_of, poison
from tests.cache.test_hits import text
from vllm_kimi_k3.cache.guard import RECURRENCE
from vllm_kimi_k3.cache.view import COUNTED, view

Simulate = Callable[..., Any]
TOKENS = text(2000, 8)


def became(simulation: Any, tokens: list[int]) -> dict[str, int]:
    """What became of one prompt's tokens, without what did not occur."""
    view(simulation.scheduler)
    simulation.serve(tokens)
    seen = view(simulation.scheduler)
    assert seen is not None
    return {reason: count for reason, count in seen["since_last_view"]["tokens"].items() if count}


def test_a_prompt_that_was_never_seen(simulate: Simulate) -> None:
    assert became(simulate(), TOKENS) == {"new": 1920, "unit": 80}


def test_an_exact_repeat_misses_only_what_no_unit_covers(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.serve(TOKENS)
    assert became(simulation, TOKENS) == {"hit": 1920, "unit": 80}
    assert book_of(simulation).counts["restores", "done"] == 1


def test_a_fork_where_no_state_was_kept(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.serve(TOKENS)
    forked = TOKENS[:1600] + text(300, 9)
    assert became(simulation, forked) == {"hit": 1024, "no_state": 512, "new": 256, "unit": 108}
    assert became(simulation, TOKENS[:1600] + text(300, 10)) == {"hit": 1536, "new": 256, "unit": 108}


@pytest.mark.parametrize("reason", ["evicted", "displaced"])
def test_a_state_that_went(simulate: Simulate, reason: str) -> None:
    simulation = simulate()
    simulation.serve(TOKENS)
    book = book_of(simulation)
    for state in sorted(book.states.values(), key=lambda state: -state.boundary):
        book.drop(state, reason)
    assert became(simulation, TOKENS) == {"evicted": 1920, "unit": 80}
    assert became(simulation, TOKENS) == {"hit": 1920, "unit": 80}


def test_a_restore_is_refused_where_a_leg_or_the_rows_are_gone(simulate: Simulate) -> None:
    simulation = simulate()
    simulation.serve(TOKENS)
    book = book_of(simulation)
    deepest = max(book.states.values(), key=lambda state: state.boundary)
    book.pool.evict_blocks({deepest.legs[min(book.groups)].block_id})
    assert became(simulation, TOKENS) == {"hit": 1024, "evicted": 896, "unit": 80}
    assert book.counts["restores", "refused"] == 1
    deepest = max(book.states.values(), key=lambda state: state.boundary)
    book.pool.evict_blocks({block.block_id for block, _ in deepest.rows.values()})
    assert became(simulation, TOKENS) == {"hit": 1024, "evicted": 896, "unit": 80}
    assert book.counts["restores", "refused"] == 2


def test_what_the_guard_dropped(simulate: Simulate) -> None:
    simulation = simulate(max_num_batched_tokens=512, max_num_seqs=8)
    poison(simulation, TOKENS)
    simulation.serve(TOKENS)
    simulation.worker.poison.clear()
    assert became(simulation, TOKENS) == {"guard": 1024, "new": 896, "unit": 80}


def test_tokens_add_up_to_prompts_and_each_view_tells_what_is_new(simulate: Simulate) -> None:
    simulation = simulate(blocks=40, max_num_batched_tokens=512, max_num_seqs=8)
    told, asked = 0, 0
    for seed in range(25):
        tokens = TOKENS[: 90 * seed] + text(40 + 7 * seed, seed % 5)
        simulation.add(tokens, 30)
        asked += len(tokens)
        if seed % 3 == 0:
            simulation.finish()
            told += sum(view(simulation.scheduler)["since_last_view"]["tokens"].values())  # type: ignore[index]
    simulation.finish()
    last = view(simulation.scheduler)
    assert last is not None
    assert told + sum(last["since_last_view"]["tokens"].values()) == asked
    assert sum(last["counts"]["tokens"].values()) == asked
    assert last["counts"]["tokens"]["hit"] == sum(simulation.cached.values())


def test_every_count_of_the_book_is_in_the_view(simulate: Simulate) -> None:
    simulation = simulate(blocks=40)
    for seed in range(20):
        if seed == 7:
            poison(simulation, text(1500, 7))
        simulation.serve(text(1500, seed % 9), 200)
        simulation.serve(text(1500, seed % 9), 200)
    book = book_of(simulation)
    assert {family for family, _ in book.counts} == set(COUNTED)
    assert all(label in COUNTED[family] for family, label in book.counts)


def test_what_is_held(simulate: Simulate) -> None:
    simulation = simulate(blocks=300)
    simulation.serve(TOKENS)
    seen = view(simulation.scheduler)
    assert seen is not None
    assert seen["states"]["held"] | {"rung": 2, "prompt": 1} == seen["states"]["held"]
    assert seen["states"]["bytes"]["rung"] == 2 * 3 * BLOCK_BYTES
    assert seen["states"]["blocks"] == 9
    assert seen["pool"] == {
        "blocks": 300,
        "free_blocks": 299,
        "withheld_blocks": 0,
        "block_bytes": BLOCK_BYTES,
    }


def test_it_says_that_it_is_not_ready_and_what_is_withheld(simulate: Simulate) -> None:
    simulation = simulate()
    for seed in range(RECURRENCE):
        poison(simulation, text(900, 70 + seed))
        simulation.serve(text(900, 70 + seed))
    seen = view(simulation.scheduler)
    assert seen is not None
    assert not seen["ready"]
    assert seen["pool"]["withheld_blocks"] > 0
    assert seen["counts"]["guard"]["requests"] == RECURRENCE


def test_it_holds_numbers_under_fixed_names_and_nothing_else(simulate: Simulate) -> None:
    """No token, no hash, no name of a request: the view may be shown to whoever runs the server."""
    first, other = simulate(), simulate()
    other.serve(TOKENS, UNIT)

    def names(value: Any) -> Any:
        return {key: names(entry) for key, entry in value.items()} if isinstance(value, dict) else type(value)

    assert names(view(first.scheduler)) == names(view(other.scheduler))
    assert json.loads(json.dumps(view(other.scheduler)))


def test_a_cache_that_is_not_ours_has_no_view(config_of: Callable[..., Any]) -> None:
    from benchmarks.prefix_cache import simulation

    assert view(simulation(config_of(), 100, ours=False).scheduler) is None
