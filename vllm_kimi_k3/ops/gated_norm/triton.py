"""The gated norm as one kernel: a program a few rows."""

import torch
import triton
import triton.language as tl

#: Values of a program's tile, about.
_TILE = 2048


@triton.jit(do_not_specialize=["rows", "gate_token"])
def _gated_norm(
    x,
    gate,
    weight,
    out,
    rows,
    gate_token,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < D)[None, :]
    value = tl.load(x + row[:, None] * D + column[None, :], mask=inside, other=0.0).to(tl.float32)
    place = (row // HEADS)[:, None] * gate_token + (row % HEADS)[:, None] * D + column[None, :]
    open_ = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=column < D, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None] * factor[None, :]
    result = normed / (1.0 + tl.exp(-open_))
    tl.store(out + row[:, None] * D + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.gated_norm.reference.gated_norm_reference`, for x and gate of [T, H, D]."""
    tokens, heads, dim = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if gate.stride()[1:] != (dim, 1):
        gate = gate.contiguous()
    block = triton.next_power_of_2(dim)
    size = max(1, _TILE // block)
    _gated_norm[(triton.cdiv(tokens * heads, size),)](
        x.contiguous(),
        gate,
        weight,
        out,
        tokens * heads,
        gate.stride(0),
        eps,
        HEADS=heads,
        D=dim,
        ROWS=size,
        BLOCK=block,
        num_warps=4,
    )
    return out
