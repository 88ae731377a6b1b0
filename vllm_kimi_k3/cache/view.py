"""The cache's numbers, for metrics and people: sums only, nothing that tells one tenant of another's prompts."""

from collections import Counter
from typing import Any

from vllm_kimi_k3.cache.guard import guard_of
from vllm_kimi_k3.cache.outcome import TOKENS
from vllm_kimi_k3.cache.policy import Kind

_KINDS = tuple(kind.name.lower() for kind in Kind)
#: Families of what is counted, and their labels.
COUNTED = {
    "tokens": TOKENS,
    "restores": ("done", "refused"),
    "kept": _KINDS,
    "dropped": ("displaced", "evicted", "guard"),
    "guard": ("requests",),
}

Families = dict[str, dict[str, int]]


def view(scheduler: Any) -> dict[str, Any] | None:
    """What a scheduler's cache holds, and what it has counted; None where its model's cache is not ours.

    Bytes are those of one rank. ``since_last_view`` is what was counted since this function was called before, so
    several processes that ask may each add up what they were given.
    """
    guard = guard_of(scheduler)
    if guard is None:
        return None
    book = guard.book
    size = _block_bytes(scheduler.kv_cache_config)
    held = book.held()
    recent = book.counts - book.viewed
    book.viewed = book.counts.copy()
    return {
        "ready": guard.ready,
        "pool": {
            "blocks": book.pool.num_gpu_blocks,
            "free_blocks": book.pool.get_num_free_blocks(),
            "withheld_blocks": len(guard.withheld),
            "block_bytes": size,
        },
        "states": {
            "held": held,
            "bytes": {kind: count * len(book.groups) * size for kind, count in held.items()},
            "blocks": book.blocks,
            "budget_blocks": book.budget,
        },
        "counts": _families(book.counts),
        "since_last_view": _families(recent),
    }


def _families(counts: Counter[tuple[str, str]]) -> Families:
    return {family: {label: counts[family, label] for label in labels} for family, labels in COUNTED.items()}


def _block_bytes(config: Any) -> int:
    """Bytes of a block: as many pages as the largest group has layers. Pages of all groups have the same size."""
    return max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups)
