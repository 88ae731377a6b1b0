"""Sigmoid, bias, top-k and renormalisation in one launch: a warp a token."""

import torch
import triton
import triton.language as tl


@triton.jit
def _select(logits, bias, ids, weights, row_stride, scale, E: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr,
            K_BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < E
    logit = tl.load(logits + token * row_stride + expert, mask=real, other=0.0)
    score = 1.0 / (1.0 + tl.exp(-logit)) + tl.load(bias + expert, mask=real, other=0.0)
    # Order of floats as order of integers, the expert below it: one maximum gives both, the lower id wins a tie.
    bits = score.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    lowest = -(2**63)
    key = tl.where(real, (rank << 32) | (BLOCK - 1 - expert), lowest)
    place = tl.arange(0, K_BLOCK)
    chosen = tl.zeros([K_BLOCK], tl.int32)
    for index in tl.static_range(K):
        best = tl.max(key, 0)
        chosen = tl.where(place == index, BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32), chosen)
        key = tl.where(key == best, lowest, key)
    taken = place < K
    logit = tl.load(logits + token * row_stride + chosen, mask=taken, other=0.0)
    weight = tl.where(taken, 1.0 / (1.0 + tl.exp(-logit)), 0.0)
    weight = weight / (tl.sum(weight, 0) + 1e-20) * scale
    tl.store(ids + token * K + place, chosen, mask=taken)
    tl.store(weights + token * K + place, weight, mask=taken)


def select(logits: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`~vllm_kimi_k3.ops.router.reference.select_reference`, with ids in int32."""
    tokens, experts = logits.shape
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    if tokens:
        _select[(tokens,)](
            logits,
            bias,
            ids,
            weights,
            logits.stride(0),
            float(scale),
            E=experts,
            BLOCK=triton.next_power_of_2(experts),
            K=top_k,
            K_BLOCK=triton.next_power_of_2(top_k),
            num_warps=1,
        )
    return ids, weights


def router(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`~vllm_kimi_k3.ops.router.reference.router_reference`, with ids in int32.

    A product of bf16 values is exact in fp32, so a bf16 product that accumulates and ends in fp32 is the fp32 one up
    to the order of the sum.
    """
    if hidden.is_cuda and hidden.dtype == weight.dtype != torch.float32:
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = hidden.float() @ weight.float().t()
    return select(logits, bias, top_k, scale)
