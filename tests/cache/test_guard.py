"""Faults: each ends in recomputation or one failed request, a count, and right answers after it."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.simulator import WrongRestoreError, extend
from tests.cache.test_hits import found, text
from vllm_kimi_k3.cache.guard import RECURRENCE, WINDOW, guard_of
from vllm_kimi_k3.cache.schedule import state_managers

Simulate = Callable[..., Any]
TOKENS = text(2000, 8)


def book_of(simulation: Any) -> Any:
    return state_managers(simulation.scheduler)[0].book


def poison(simulation: Any, tokens: list[int]) -> int:
    """Have the logits after these tokens be NaN; returns what names the prefix."""
    prefix = extend([0], tokens)[-1]
    simulation.worker.poison.add(prefix)
    return prefix


def test_nan_logits_fail_one_request_and_leave_nothing(simulate: Simulate) -> None:
    simulation = simulate()
    other = simulation.add(text(1500, 2), 20)
    poison(simulation, TOKENS)
    request = simulation.add(TOKENS, 5)
    simulation.finish()
    assert request.get_finished_reason().name == "ERROR"
    assert list(request.output_token_ids) == []
    assert len(other.output_token_ids) == 20
    book = book_of(simulation)
    assert book.counts["guard", "requests"] == 1
    simulation.worker.poison.clear()
    assert found(simulation, TOKENS) == 0
    assert found(simulation, TOKENS) == 1920


def test_nan_in_a_later_step_drops_what_earlier_steps_kept(simulate: Simulate) -> None:
    simulation = simulate(max_num_batched_tokens=512, max_num_seqs=8)
    poison(simulation, TOKENS[:1536])
    request = simulation.add(TOKENS, 5)
    simulation.finish()
    assert request.get_finished_reason().name == "ERROR"
    assert not book_of(simulation).states
    simulation.worker.poison.clear()
    assert found(simulation, TOKENS) == 0


def test_what_the_request_started_from_stays(simulate: Simulate) -> None:
    simulation = simulate()
    shared, longer = TOKENS[:1100], TOKENS[:1100] + text(500, 3)
    simulation.serve(shared)
    poison(simulation, longer)
    request = simulation.add(longer)
    simulation.finish()
    assert request.get_finished_reason().name == "ERROR"
    assert found(simulation, shared) == 1024


def test_blocks_are_withheld_and_the_withheld_are_bounded(simulate: Simulate) -> None:
    simulation = simulate(blocks=160)
    for seed in range(6):
        tokens = text(1500, 40 + seed)
        poison(simulation, tokens)
        simulation.serve(tokens)
    guard = guard_of(simulation.scheduler)
    assert guard is not None
    assert 0 < len(guard.withheld) <= 10
    assert simulation.free_blocks == 159 - len(guard.withheld)


def test_readiness_goes_when_it_recurs_and_comes_back(simulate: Simulate) -> None:
    simulation = simulate()
    guard = guard_of(simulation.scheduler)
    assert guard is not None
    now = [0.0]
    guard.clock = lambda: now[0]
    for seed in range(RECURRENCE):
        assert guard.ready
        tokens = text(900, 70 + seed)
        poison(simulation, tokens)
        simulation.serve(tokens)
    assert not guard.ready
    now[0] = WINDOW + 1
    assert guard.ready


@pytest.mark.parametrize("group", [0, 1, 2])
def test_losing_one_leg_voids_the_state(simulate: Simulate, group: int) -> None:
    simulation = simulate()
    simulation.serve(TOKENS)
    book = book_of(simulation)
    deepest = max(book.states.values(), key=lambda state: state.boundary)
    leg = sorted(book.groups)[group]
    book.pool.evict_blocks({deepest.legs[leg].block_id})
    assert found(simulation, TOKENS) == 1024
    assert book.counts["dropped", "evicted"] == 1


def test_losing_rows_leaves_the_states_before_them(simulate: Simulate) -> None:
    simulation = simulate()
    request = simulation.add(TOKENS, 30)
    simulation.step()
    rows = simulation.scheduler.kv_cache_manager.coordinator.single_type_managers[-1]
    page = rows.req_to_blocks[request.request_id][1]
    simulation.finish()
    rows.block_pool.evict_blocks({page.block_id})
    assert found(simulation, TOKENS) == 512


def test_a_state_of_another_boundary_is_noticed_by_the_worker(simulate: Simulate) -> None:
    """The check of the pretended worker can fail: this is what all other tests of hits lean on."""
    simulation = simulate()
    simulation.serve(TOKENS)
    deepest = max(book_of(simulation).states.values(), key=lambda state: state.boundary)
    simulation.worker.pages[deepest.legs[min(deepest.legs)].block_id] = extend([0], TOKENS[:1024])[-1]
    with pytest.raises(WrongRestoreError, match="first 1920 tokens"):
        simulation.serve(TOKENS)


def test_a_crash_between_write_and_hash_leaves_no_hash(simulate: Simulate) -> None:
    """The step wrote its states, but its output never came."""
    simulation = simulate()
    request = simulation.add(TOKENS, 5)
    output = simulation.scheduler.schedule()
    simulation.worker.run(output, simulation.requests)
    simulation.abort(request)
    assert not book_of(simulation).states
