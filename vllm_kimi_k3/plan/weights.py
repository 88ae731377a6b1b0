"""Bytes of weights by kind: in the files, and on one rank."""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from vllm_kimi_k3.model.layout import Share, Slot, expert_slots, layer_slots, model_slots, vision_slots
from vllm_kimi_k3.plan.release import STORED_A_LOG, STORED_FP32

#: Kinds in the order of a report.
KINDS = (
    "experts",
    "shared experts",
    "router and latent",
    "KDA",
    "MLA",
    "dense MLP",
    "embedding and head",
    "norms",
    "vision",
)

#: Parameters that the model keeps in fp32 whatever its dtype, by the end of their names.
_HELD_FP32 = ("conv_weight", "A_log", "dt_bias", "e_score_correction_bias")


def stored_bytes(text: Any, vision: Mapping[str, Any] | None) -> int:
    """Bytes of all published tensors, as the index states them in ``total_size``.

    Args:
        text: the text config.
        vision: the vision config, or None for a text-only checkpoint.
    """
    whole = Share(range(text.num_hidden_layers))
    total = 0
    for _, name, slot, copies in _slots(text, vision, whole):
        if name.endswith("A_log"):
            total += STORED_A_LOG * 4 * copies
        else:
            width = 1 if slot.quantised else 4 if name.endswith(STORED_FP32) else 2
            total += prod(slot.shape) * width * copies
    return total


def rank_bytes(text: Any, vision: Mapping[str, Any] | None, share: Share, width: int = 2) -> dict[str, int]:
    """Bytes of weights that one process holds, by kind.

    Args:
        text: the text config.
        vision: the vision config, or None if the vision tower is not loaded.
        share: what the process holds.
        width: bytes of a value of the model's dtype.

    Raises:
        ValueError: the parallel sizes do not divide what they slice.
    """
    totals: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for kind, _, slot, copies in _slots(text, vision, share):
        taken = prod(slot.shape) // slot.shape[slot.dim] * slot.length
        each = 1 if slot.quantised else 4 if slot.parameter.endswith(_HELD_FP32) else width
        totals[kind] += taken * each * copies
    return dict(totals)


def _slots(text: Any, vision: Mapping[str, Any] | None, share: Share) -> Iterator[tuple[str, str, Slot, int]]:
    """Kind, name, slot and how often, of every tensor that a process holds a part of."""
    last = text.num_hidden_layers - 1
    for name, slot in model_slots(text, share).items():
        beside = 0 if "embed_tokens" in name else last
        if beside in share.layers:
            yield "embedding and head" if "norm" not in name and "res" not in name else "norms", name, slot, 1
    for layer in share.layers:
        for name, slot in layer_slots(text, share, layer).items():
            yield _kind(text, layer, name), name, slot, 1
    routed = sum(layer >= text.first_k_dense_replace for layer in share.layers)
    for name, slot in expert_slots(text, share).items():
        yield "experts", name, slot, routed * len(share.experts(text.num_experts))
    if vision is not None:
        for name, slot in vision_slots(vision, share).items():
            yield "vision", name, slot, 1


def _kind(text: Any, layer: int, name: str) -> str:
    if name.startswith("self_attn."):
        return "KDA" if layer + 1 in text.linear_attn_config["kda_layers"] else "MLA"
    if name.startswith("block_sparse_moe.shared_experts."):
        return "shared experts"
    if name.startswith("block_sparse_moe."):
        return "router and latent"
    return "dense MLP" if name.startswith("mlp.") else "norms"
