"""SiTU as one elementwise kernel, and as a function for kernels that end in it."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def bounded(x, bound):
    """``bound * tanh(x / bound)``; a series where the closed form would cancel."""
    t = x / bound
    s = t * t
    series = t * (1.0 - s * (1.0 / 3.0 - s * (2.0 / 15.0 - s * (17.0 / 315.0 - s * (62.0 / 2835.0)))))
    closed = 1.0 - 2.0 / (tl.exp(2.0 * t) + 1.0)
    return bound * tl.where(s < 0.0625, series, closed)


@triton.jit
def situ_value(gate, up, beta, linear_beta, BOUND_UP: tl.constexpr):
    """SiTU of fp32 tensors of one shape."""
    if BOUND_UP:
        up = bounded(up, linear_beta)
    return bounded(gate, beta) / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _situ(
    gate_up, out, beta, linear_beta, row_stride, INNER: tl.constexpr, BLOCK: tl.constexpr, BOUND_UP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + INNER + column, mask=inside, other=0.0).to(tl.float32)
    value = situ_value(gate, up, beta, linear_beta, BOUND_UP)
    tl.store(out + row * INNER + column, value.to(out.dtype.element_ty), mask=inside)


def situ(gate_up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.situ.reference.situ_reference`."""
    inner = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * inner)
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    if rows.shape[0] == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(inner))
    _situ[(rows.shape[0], triton.cdiv(inner, block))](
        rows,
        out,
        float(beta),
        float(linear_beta or 1.0),
        rows.stride(0),
        INNER=inner,
        BLOCK=block,
        BOUND_UP=linear_beta is not None,
        num_warps=4,
    )
    return out
