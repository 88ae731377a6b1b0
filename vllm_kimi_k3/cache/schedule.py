"""What the scheduler does for the cache: where a prompt's step ends, and which states it leaves."""

from typing import Any

from vllm.v1.request import Request

from vllm_kimi_k3.cache.manager import KdaManager
from vllm_kimi_k3.cache.policy import Kind, Marks, floor_to, wanted

#: What a step leaves however little room there is: dropping these would make the next request miss for certain.
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
    room = book.make_room(len(passed) * len(managers)) // len(managers)
    for kind, boundary in passed[: max(len(passed) - room, 0)]:
        if kind < _ESSENTIAL:
            del plan[boundary]
    return stop - start
