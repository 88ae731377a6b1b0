"""What the scheduler does for the cache: where a prompt's step ends, and which states it leaves."""

from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request

from vllm_kimi_k3.cache.manager import KdaManager
from vllm_kimi_k3.cache.policy import Kind, Marks, floor_to, wanted

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
    if start >= end:
        return new
    leader = managers[0]
    unit, book = leader.block_size, leader.book
    stop = start + new
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
            lookahead=leader.block_pool.hash_block_size if leader.drop_eagle_checkpoint_block else 0,
        )
    plan = book.plans[request.request_id]
    passed = sorted((kind, boundary) for boundary, kind in plan.items() if start < boundary <= stop)
    restored = request.block_hashes[local // leader.block_pool.hash_block_size - 1] if local else None
    allowed = book.make_room(len(passed) * len(managers), restored)
    spare = _spare_blocks(scheduler, managers, request, start, stop)
    for _, boundary in passed[: max(len(passed) - spare // len(managers), 0)]:
        del plan[boundary]
    for kind, boundary in passed[: max(len(passed) - allowed // len(managers), 0)]:
        if kind < _ESSENTIAL:
            plan.pop(boundary, None)
    return stop - start


def _spare_blocks(scheduler: Any, managers: list[KdaManager], request: Request, start: int, stop: int) -> int:
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
