"""What the scheduler does for the cache: where a prompt's step ends, and which states it leaves."""

from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_kimi_k3.cache.manager import KdaManager
from vllm_kimi_k3.cache.policy import Kind, Marks, floor_to, value, wanted
from vllm_kimi_k3.cache.state import State

#: What a step leaves even if states hold their share already: without it the next request would miss for certain.
_ESSENTIAL = Kind.PROMPT


def state_managers(scheduler: Any) -> list[KdaManager]:
    """The managers of a scheduler's KDA groups; empty if its model is not ours or caches nothing."""
    return [m for m in scheduler.kv_cache_manager.coordinator.single_type_managers if isinstance(m, KdaManager)]


def step_tokens(
    scheduler: Any, managers: list[KdaManager], request: Request, new: int, local: int = 0, external: int = 0
) -> int:
    """How many of ``new`` tokens a request's next step takes, with the states it is to leave noted in the book.

    A prompt's step ends at a hash unit, so that the next one starts on the grid of the chunked scan. Nothing else cuts
    a prompt: the scan gives out the states inside a step.

    Args:
        scheduler: vLLM's.
        managers: see :func:`state_managers`.
        request: about to be given slots.
        new: tokens that the budget allows.
        local: tokens just found in the cache.
        external: tokens that a connector brings.
    """
    start = request.num_computed_tokens + local + external
    end = max(request.num_prompt_tokens, request.num_tokens - 1)
    leader = managers[0]
    unit, book = leader.block_size, leader.book
    stop = start + new
    if start >= end:
        # A generated token enters a new column once a unit, and pages end with columns.
        if (stop - 1) // unit > (start - 1) // unit:
            book.make_room(_blocks_taken(scheduler, managers, request, stop, 0))
        return new
    aligned = floor_to(stop, unit)
    if (stop < end or start % unit) and aligned > start:
        stop = aligned
    if request.num_computed_tokens == 0 or request.request_id not in book.plans:
        book.plans[request.request_id] = wanted(
            request.all_token_ids if request.prompt_token_ids is not None else None,
            request.num_tokens,
            start,
            unit,
            Marks.of_vocabulary(scheduler.vllm_config.model_config.get_vocab_size()),
            fork=request.shared_prefix_boundary,
            lookahead=leader.lookahead,
        )
    restored = None
    if local:
        restored = book.states.get(request.block_hashes[local // leader.block_pool.hash_block_size - 1])
    _admit(scheduler, managers, request, (start, stop), local, restored)
    return stop - start


def _admit(
    scheduler: Any,
    managers: list[KdaManager],
    request: Request,
    step: tuple[int, int],
    local: int,
    restored: State | None,
) -> None:
    """Make room for a step, and strike from the plan the states that are not worth what would have to go for them."""
    book, legs = managers[0].book, len(managers)
    plan = book.plans[request.request_id]
    start, stop = step
    taken = _blocks_taken(scheduler, managers, request, stop, local)
    spare = _spare_blocks(scheduler, managers, request, stop)
    book.make_room(taken, restored)
    states = 0
    for boundary, worth in _by_worth(plan, start, stop, legs):
        essential = plan[boundary] >= _ESSENTIAL
        states += legs
        room = states <= spare and book.make_room(taken + states, restored, states, None if essential else worth)
        if not room and not (essential and states <= spare):
            del plan[boundary]
            states -= legs


def _by_worth(plan: dict[int, Kind], start: int, stop: int, legs: int) -> list[tuple[int, float]]:
    """The boundaries that a step passes and what a block of a state there saves, those worth most first."""
    passed = sorted(boundary for boundary in plan if start < boundary <= stop)
    gains = [boundary - before for before, boundary in zip([start, *passed], passed, strict=False)]
    worths = [value(plan[at], gain, 0, superseded=False) / legs for at, gain in zip(passed, gains, strict=True)]
    return sorted(zip(passed, worths, strict=True), key=lambda entry: (plan[entry[0]] < _ESSENTIAL, -entry[1]))


def _blocks_taken(scheduler: Any, managers: list[KdaManager], request: Request, stop: int, local: int) -> int:
    """Blocks that a step takes from the pool, without the states that it leaves on the way."""
    name, leader = request.request_id, managers[0]
    columns = len(leader.req_to_blocks.get(name, ())) or local // leader.block_size
    taken = len(managers) * sum(leader.new_columns({}, columns, stop))
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        if not isinstance(manager, KdaManager):
            # A page that was found in part is copied.
            pages = len(manager.req_to_blocks.get(name, ())) or local // manager.block_size
            taken += max(cdiv(stop, manager.block_size) - pages, 0)
    return taken


def _spare_blocks(scheduler: Any, managers: list[KdaManager], request: Request, stop: int) -> int:
    """Blocks that are left once a step has what it cannot do without."""
    cache = scheduler.kv_cache_manager
    # The running state, and the one that the request starts from, which lies in the free queue until then.
    needed = cache.watermark_blocks + len(managers) * (2 + managers[0].num_speculative_blocks)
    for manager in cache.coordinator.single_type_managers:
        if not isinstance(manager, KdaManager):
            # Pages that are found lie in the free queue too; one of them may be copied.
            have = len(manager.req_to_blocks.get(request.request_id, ()))
            needed += cdiv(stop, manager.block_size) - have + 1
    return max(cache.block_pool.get_num_free_blocks() - needed, 0)
