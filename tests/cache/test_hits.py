"""How much of a prompt is found, through vLLM's real scheduler at K3's cache geometry."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.geometry import UNIT
from tests.cache.test_policy import MARKS, SYSTEM, USER, message
from vllm_kimi_k3.cache.policy import floor_to
from vllm_kimi_k3.cache.schedule import state_managers

Simulate = Callable[..., Any]


def text(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(900) for _ in range(length)]


def found(simulation: Any, tokens: list[int], new: int = 1) -> int:
    """Tokens of a request that came from the cache; it runs alone."""
    return int(simulation.cached[simulation.serve(tokens, new).request_id])


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "scheduled ahead"])
def test_exact_repeats(simulate: Simulate, ahead: bool) -> None:
    simulation = simulate(ahead=ahead)
    for length in range(100, 3100, 37):
        tokens = text(length, length)
        assert found(simulation, tokens) == 0
        assert found(simulation, tokens) == floor_to(length - 1, UNIT), length


def test_unit_of_64(simulate: Simulate) -> None:
    simulation = simulate(unit=64)
    for length in (65, 100, 200, 777, 3000):
        tokens = text(length, length)
        assert found(simulation, tokens) == 0
        assert found(simulation, tokens) == floor_to(length - 1, 64), length


@pytest.mark.parametrize("size", [150, 256, 300, 700, 768, 1500, 1700, 4000, 6000])
def test_second_user_of_a_system_prompt(simulate: Simulate, marks_of_miniature: Any, size: int) -> None:
    simulation = simulate()
    system = chat(message(SYSTEM, size - 6), marks_of_miniature)
    for user in range(3):
        tokens = system + chat([*message(USER, 300)[:5], *text(300, user), MARKS.end_of_msg], marks_of_miniature)
        assert found(simulation, tokens) == (floor_to(size, UNIT) if user else 0)


def chat(tokens: list[int], marks: Any) -> list[int]:
    """Messages in the special ids of another vocabulary."""
    swap = {MARKS.open: marks.open, MARKS.end_of_msg: marks.end_of_msg}
    return [swap.get(token, token) for token in tokens]


def test_growing_conversation(simulate: Simulate) -> None:
    simulation = simulate()
    tokens, before = text(700, 1), 1
    for turn in range(8):
        request = simulation.serve(tokens, new=70 + turn)
        assert simulation.cached[request.request_id] == floor_to(before - 1, UNIT)
        before = request.num_tokens
        tokens = list(request.all_token_ids) + text(150 * turn, turn)


@pytest.mark.parametrize("length", [1000, 1023, 1500, 2047, 2500, 4000, 5900])
def test_fork_in_raw_text(simulate: Simulate, length: int) -> None:
    simulation = simulate()
    shared = text(6000, 3)[:length]
    first, second, third = (found(simulation, shared + text(400, seed)) for seed in (11, 12, 13))
    assert first == 0
    assert length / 2 <= second <= length
    assert third == floor_to(length, UNIT)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_alternating_conversations_keep_their_hits(simulate: Simulate, count: int) -> None:
    # Rows of every conversation, its newest states, and what runs.
    simulation = simulate(blocks=1 + count * (5 + 4 * 3) + 12)
    histories = [text(1500, seed) for seed in range(count)]
    lengths = [1] * count
    for turn in range(4):
        for index, tokens in enumerate(histories):
            request = simulation.serve(tokens, new=40)
            assert simulation.cached[request.request_id] == floor_to(lengths[index] - 1, UNIT)
            lengths[index] = request.num_tokens
            histories[index] = list(request.all_token_ids) + text(300, turn * 100 + index)


@pytest.mark.parametrize("budget", [100, 128, 300, 777])
def test_small_steps_change_no_hit(simulate: Simulate, budget: int) -> None:
    simulation = simulate(max_num_batched_tokens=budget, max_num_seqs=8)
    tokens = text(2000, 5)
    assert found(simulation, tokens) == 0
    assert found(simulation, tokens) == floor_to(1999, UNIT)
    assert found(simulation, tokens[:1100] + text(300, 6)) == 1024


def test_requests_that_run_together(simulate: Simulate) -> None:
    """Twins of one step share nothing that is not written yet; later ones find it."""
    simulation = simulate()
    tokens = text(1500, 9)
    twins = [simulation.add(tokens, 5) for _ in range(3)]
    simulation.finish()
    assert [simulation.cached[twin.request_id] for twin in twins] == [0, 0, 0]
    assert len({tuple(twin.output_token_ids) for twin in twins}) == 1
    assert found(simulation, tokens) == 1408


@pytest.mark.parametrize("ahead", [False, True], ids=["in step", "scheduled ahead"])
@pytest.mark.parametrize("lengths", [range(193, 201), range(449, 457), range(1217, 1225)], ids=lambda r: str(r[0]))
def test_requests_that_enter_one_page_together(simulate: Simulate, lengths: range, ahead: bool) -> None:
    """Each copies the page that it shares from one that was written before, not from another's copy of this step."""
    simulation = simulate(ahead=ahead)
    tokens = text(3000, 10)
    simulation.serve(tokens)
    # These leave the states; rows of the first request end at other boundaries than those asked for below.
    for length in (129, 385, 1153):
        simulation.serve(tokens[:length])
    together = [simulation.add(tokens[:length], 3) for length in lengths]
    simulation.finish()
    assert [simulation.cached[request.request_id] for request in together] == [
        floor_to(length - 1, UNIT) for length in lengths
    ]


def test_rows_computed_again_beside_an_old_state_are_no_source(simulate: Simulate) -> None:
    """A state outlives its rows: who finds the rows of a step that has not run would copy what is not there."""
    simulation = simulate()
    tokens = text(1400, 12)
    simulation.serve(tokens[:700])
    manager = simulation.scheduler.kv_cache_manager
    rows = [
        block.block_id
        for block in manager.block_pool.blocks
        if isinstance(simulation.worker.pages.get(block.block_id), list)
    ]
    manager.evict_blocks(set(rows))
    together = [simulation.add(tokens, 3) for _ in range(3)]
    simulation.finish()
    assert [simulation.cached[request.request_id] for request in together] == [0, 0, 0]


@pytest.mark.parametrize("blocks", range(14, 60, 5))
def test_room_is_not_made_at_the_cost_of_the_state_to_start_from(simulate: Simulate, blocks: int) -> None:
    """Between being found and being pinned, a state that may go first must not go for the states of its own step."""
    simulation = simulate(blocks=blocks)
    (manager, *_) = state_managers(simulation.scheduler)
    tokens = text(2600, 15)
    simulation.serve(tokens)
    for fork in (700, 1300, 2000, 2500):
        request = simulation.add(tokens[:fork] + text(300, fork), 2)
        simulation.step()
        assert manager.restored_tokens(request.request_id) == simulation.cached[request.request_id]
        simulation.finish()


def test_an_aborted_request_leaves_only_what_was_processed(simulate: Simulate) -> None:
    simulation = simulate(max_num_batched_tokens=512, max_num_seqs=8)
    tokens = text(2000, 4)
    request = simulation.add(tokens, 5)
    simulation.step()
    simulation.step()
    simulation.abort(request)
    simulation.finish()
    assert found(simulation, tokens) == 1024


def test_preempted_requests_go_on_right(simulate: Simulate) -> None:
    simulation = simulate(blocks=16)
    requests = [simulation.add(text(700, seed), 2500) for seed in range(3)]
    simulation.finish()
    assert sum(request.num_preemptions for request in requests) > 0
    alone = simulate(blocks=300)
    for request in requests:
        assert list(alone.serve(request.prompt_token_ids, 2500).output_token_ids) == list(request.output_token_ids)


def test_nothing_is_lost_from_the_pool(simulate: Simulate) -> None:
    simulation = simulate(blocks=120)
    for seed in range(30):
        simulation.add(text(1000 + 100 * seed, seed % 7), 30)
    simulation.finish()
    assert simulation.free_blocks == 119
