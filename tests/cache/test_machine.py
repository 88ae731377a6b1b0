"""Random traffic and random faults through the real scheduler, against what must always hold."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from benchmarks.simulator import extend
from tests.cache.test_hits import text
from vllm_kimi_k3.cache.schedule import state_managers

BLOCKS = 40
#: Conversations share these, so forks, repeats and growth all happen.
STEMS = [text(2600, seed) for seed in range(3)]


class Traffic(RuleBasedStateMachine):
    """Requests come, run, end, are aborted; states and rows are evicted; logits turn to NaN."""

    simulate: Any

    @initialize(ahead=st.booleans(), budget=st.sampled_from([300, 2048]))
    def start(self, ahead: bool, budget: int) -> None:
        self.simulation = self.simulate(blocks=BLOCKS, ahead=ahead, max_num_batched_tokens=budget, max_num_seqs=4)
        self.pool = self.simulation.scheduler.kv_cache_manager.block_pool
        self.managers = state_managers(self.simulation.scheduler)
        self.book = self.managers[0].book
        self.requests: list[Any] = []

    def pick(self, seed: int) -> Any:
        live = [request for request in self.requests if not request.is_finished()]
        return live[seed % len(live)] if live else None

    @rule(stem=st.sampled_from([0, 1, 2]), cut=st.integers(1, 2600), tail=st.integers(0, 400), new=st.integers(1, 200))
    def ask(self, stem: int, cut: int, tail: int, new: int) -> None:
        self.requests.append(self.simulation.add(STEMS[stem][:cut] + text(tail, tail), new))

    @rule(index=st.integers(0, 100), more=st.integers(1, 300))
    def go_on(self, index: int, more: int) -> None:
        done = [request for request in self.requests if request.is_finished() and request.num_output_tokens]
        if done:
            before = list(done[index % len(done)].all_token_ids)[:4000]
            self.requests.append(self.simulation.add(before + text(more, more), 20))

    @rule(steps=st.integers(1, 40))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @rule(seed=st.integers(0, 100))
    def abort(self, seed: int) -> None:
        request = self.pick(seed)
        if request is not None:
            self.simulation.abort(request)

    @rule(seed=st.integers(0, 1000))
    def evict(self, seed: int) -> None:
        cached = [block.block_id for block in self.pool.blocks if block.block_hash is not None]
        if cached:
            self.simulation.scheduler.kv_cache_manager.evict_blocks({random.Random(seed).choice(cached)})

    @rule(seed=st.integers(0, 100))
    def spoil(self, seed: int) -> None:
        request = self.pick(seed)
        if request is not None:
            self.simulation.worker.poison.add(extend([0], list(request.all_token_ids))[-1])

    @invariant()
    def no_block_is_freed_twice_or_lost(self) -> None:
        if not hasattr(self, "pool"):
            return
        queued = self.pool.free_block_queue.get_all_free_blocks()
        assert len({block.block_id for block in queued}) == len(queued) == self.simulation.free_blocks
        assert all(block.ref_cnt == 0 for block in queued)
        assert all(block.ref_cnt > 0 or block in queued for block in self.pool.blocks[1:])

    @invariant()
    def a_state_that_can_be_found_is_written_in_all_groups(self) -> None:
        if not hasattr(self, "pool"):
            return
        pages = self.simulation.worker.pages
        for state in self.book.states.values():
            if self.book.whole(state):
                held = {pages[state.legs[group].block_id] for group in self.book.groups}
                assert len(held) == 1
                assert held == {self.prefix_of(state)}

    @invariant()
    def a_request_knows_where_it_started(self) -> None:
        """Making room for a step's states must not take the one that the step starts from."""
        if not hasattr(self, "pool"):
            return
        for manager in self.managers:
            for name, trail in manager.trails.items():
                if trail.request.num_preemptions == 0:
                    assert trail.start == self.simulation.cached[name]

    def prefix_of(self, state: Any) -> int:
        for request in reversed(self.requests):
            index = state.boundary // self.pool.hash_block_size - 1
            if index < len(request.block_hashes) and request.block_hashes[index] == state.hash:
                return extend([0], list(request.all_token_ids)[: state.boundary])[-1]
        raise AssertionError(f"a state of {state.boundary} tokens belongs to no request")

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.simulation.worker.poison.clear()
        self.simulation.finish()
        assert all(request.is_finished() for request in self.requests)
        withheld = BLOCKS - 1 - self.simulation.free_blocks
        assert withheld <= BLOCKS / 16
        assert not self.book.plans
        assert not any(manager.trails or manager.req_to_blocks for manager in self.managers)


@pytest.mark.slow
def test_traffic(simulate: Any) -> None:
    """Every step also checks, in the pretended worker, that no request computes from a wrong page."""
    Traffic.simulate = staticmethod(simulate)
    run_state_machine_as_test(
        Traffic,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        ),
    )
