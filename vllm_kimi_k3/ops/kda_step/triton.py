"""The KDA mixer of a decode or verify step as two kernels.

The first advances the state: rows of a head's state do not see each other, so a program has a slice of them, which lies
in registers from its load to its store; with a whole head in one program, a small batch left most of the GPU idle. The
second has what needs the whole head: the norm, the output gate, and the window, which all slices have read by then.
"""

import torch
import triton
import triton.language as tl

from vllm_kimi_k3.ops.kda.reference import L2_EPS

#: Programs of the first kernel from which on slices are larger, so that fewer of them load a head's queries and keys.
_MANY = 512


@triton.jit
def _conv(a, b, c, x, weight, channel):
    """SiLU of four inputs, oldest first, each weighted a channel."""
    y = a * tl.load(weight + 4 * channel) + b * tl.load(weight + 4 * channel + 1)
    y += c * tl.load(weight + 4 * channel + 2) + x * tl.load(weight + 4 * channel + 3)
    return y / (1.0 + tl.exp(-y))


@triton.jit
def _row(window, row, row_stride, channel, channel_stride):
    return tl.load(window + row * row_stride + channel * channel_stride).to(tl.float32)


@triton.jit
def _span(slots, starts, accepted, sequence, slot_stride, VERIFY: tl.constexpr):
    """A sequence's first token, number of tokens, window row to start from, slots and page; a page < 0 is padding."""
    mine = slots + sequence.to(tl.int64) * slot_stride
    page = tl.load(mine).to(tl.int64)
    if VERIFY:
        first = tl.load(starts + sequence).to(tl.int64)
        count = (tl.load(starts + sequence + 1) - tl.load(starts + sequence)).to(tl.int32)
        seen = tl.load(accepted + sequence).to(tl.int32) - 1
        page = tl.where(count > 0, page, -1)
    else:
        first = sequence.to(tl.int64)
        count = 1
        seen = 0
    return first, count, seen, mine, page


@triton.jit(do_not_specialize=["slot_stride", "window_page", "state_page"])
def _advance(
    qkv,
    gate,
    beta,
    mixed,
    conv_weight,
    windows,
    a_log,
    dt_bias,
    states,
    slots,
    starts,
    accepted,
    qkv_stride,
    gate_stride,
    beta_stride,
    window_page,
    window_row,
    window_channel,
    state_page,
    slot_stride,
    lower_bound,
    l2_eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SLICE: tl.constexpr,
    VERIFY: tl.constexpr,
):
    """Convolution, gates and delta rule for a slice of a head's value rows; ``mixed`` gets the outputs in fp32."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first, count, seen, mine, page = _span(slots, starts, accepted, sequence, slot_stride, VERIFY)
    if page < 0:
        return
    key = tl.arange(0, D)
    value = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    read = page
    if VERIFY:
        read = tl.load(mine + seen).to(tl.int64)
    place = (head * D + value[:, None]) * D + key[None, :]
    state = tl.load(states + read * state_page + place).to(tl.float32)

    q_channel = head * D + key
    k_channel = (HEADS + head) * D + key
    v_channel = (2 * HEADS + head) * D + value
    window = windows + page * window_page
    q0 = _row(window, seen, window_row, q_channel, window_channel)
    q1 = _row(window, seen + 1, window_row, q_channel, window_channel)
    q2 = _row(window, seen + 2, window_row, q_channel, window_channel)
    k0 = _row(window, seen, window_row, k_channel, window_channel)
    k1 = _row(window, seen + 1, window_row, k_channel, window_channel)
    k2 = _row(window, seen + 2, window_row, k_channel, window_channel)
    v0 = _row(window, seen, window_row, v_channel, window_channel)
    v1 = _row(window, seen + 1, window_row, v_channel, window_channel)
    v2 = _row(window, seen + 2, window_row, v_channel, window_channel)
    slope = tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + q_channel).to(tl.float32)

    for t in range(count):
        token = first + t
        inputs = qkv + token * qkv_stride
        raw_q = tl.load(inputs + q_channel).to(tl.float32)
        raw_k = tl.load(inputs + k_channel).to(tl.float32)
        raw_v = tl.load(inputs + v_channel).to(tl.float32)
        q = _conv(q0, q1, q2, raw_q, conv_weight, q_channel)
        k = _conv(k0, k1, k2, raw_k, conv_weight, k_channel)
        v = _conv(v0, v1, v2, raw_v, conv_weight, v_channel)
        q0 = q1
        q1 = q2
        q2 = raw_q
        k0 = k1
        k1 = k2
        k2 = raw_k
        v0 = v1
        v1 = v2
        v2 = raw_v
        q = q * tl.rsqrt(tl.sum(q * q, 0) + l2_eps) * (D**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + l2_eps)
        shifted = tl.load(gate + token * gate_stride + q_channel).to(tl.float32) + bias
        decay = tl.exp(lower_bound / (1.0 + tl.exp(-slope * shifted)))
        weight = 1.0 / (1.0 + tl.exp(-tl.load(beta + token * beta_stride + head).to(tl.float32)))

        state = state * decay[None, :]
        delta = weight * (v - tl.sum(state * k[None, :], 1))
        # The new state's output, from the decayed state: both sums over it run side by side.
        result = tl.sum(state * q[None, :], 1) + delta * tl.sum(q * k, 0)
        state = state + delta[:, None] * k[None, :]
        target = page
        if VERIFY:
            target = tl.load(mine + t).to(tl.int64)
        tl.store(states + target * state_page + place, state.to(states.dtype.element_ty))
        tl.store(mixed + (token * HEADS + head) * D + value, result)


@triton.jit(do_not_specialize=["slot_stride", "window_page"])
def _finish(
    qkv,
    mixed,
    out_gate,
    out,
    windows,
    slots,
    starts,
    accepted,
    norm_weight,
    qkv_stride,
    out_gate_stride,
    window_page,
    window_row,
    window_channel,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    VERIFY: tl.constexpr,
):
    """Gated norm of a head, and its channels of the window moved on."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first, count, seen, _, page = _span(slots, starts, accepted, sequence, slot_stride, VERIFY)
    value = tl.arange(0, D)
    if page < 0:
        for t in range(count):
            tl.store(out + ((first + t) * HEADS + head) * D + value, tl.zeros([D], out.dtype.element_ty))
        return
    kind = windows.dtype.element_ty
    window = windows + page * window_page
    norm = tl.load(norm_weight + value).to(tl.float32)
    for part in tl.static_range(3):
        channel = (part * HEADS + head) * D + value
        older = tl.load(window + (seen + 1) * window_row + channel * window_channel)
        old = tl.load(window + (seen + 2) * window_row + channel * window_channel)
        # Warps may hold copies of the rows: none is overwritten before all have read them.
        tl.debug_barrier()
        tl.store(window + channel * window_channel, older)
        tl.store(window + window_row + channel * window_channel, old)
        for t in range(count):
            raw = tl.load(qkv + (first + t) * qkv_stride + channel)
            tl.store(window + (2 + t) * window_row + channel * window_channel, raw.to(kind))
    for t in range(count):
        token = first + t
        result = tl.load(mixed + (token * HEADS + head) * D + value)
        result = result * tl.rsqrt(tl.sum(result * result, 0) / D + eps) * norm
        open_ = tl.load(out_gate + token * out_gate_stride + head * D + value).to(tl.float32)
        result = result / (1.0 + tl.exp(-open_))
        tl.store(out + (token * HEADS + head) * D + value, result.to(out.dtype.element_ty))


def _launch(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    slots: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    starts: torch.Tensor | None,
    accepted: torch.Tensor | None,
) -> torch.Tensor:
    """Run both kernels; without ``starts`` every sequence has one token."""
    heads, dim = gate.shape[-2:]
    sequences = slots.shape[0]
    if out is None:
        out = torch.empty(gate.shape, dtype=qkv.dtype, device=qkv.device)
    if sequences == 0:
        return out
    mixed = torch.empty(gate.shape, dtype=torch.float32, device=qkv.device)
    out_gate = out_gate.view(gate.shape)
    size = 16 if sequences * heads * dim < 32 * _MANY else min(32, dim)
    verify = starts is not None
    span = (slots, slots if starts is None else starts, slots if accepted is None else accepted)
    _advance[(sequences, heads, dim // size)](
        qkv,
        gate,
        beta,
        mixed,
        conv_weight,
        windows,
        a_log,
        dt_bias,
        states,
        *span,
        qkv.stride(0),
        gate.stride(0),
        beta.stride(0),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        states.stride(0),
        slots.stride(0),
        float(lower_bound),
        L2_EPS,
        HEADS=heads,
        D=dim,
        SLICE=size,
        VERIFY=verify,
        num_warps=size // 8,
    )
    _finish[(sequences, heads)](
        qkv,
        mixed,
        out_gate,
        out,
        windows,
        *span,
        norm_weight,
        qkv.stride(0),
        out_gate.stride(0),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        slots.stride(0),
        eps,
        HEADS=heads,
        D=dim,
        VERIFY=verify,
        num_warps=1,
    )
    return out


def kda_decode_step(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    pages: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda_step.reference.kda_decode_step_reference`."""
    constants = (conv_weight, windows, a_log, dt_bias, lower_bound, states, pages, norm_weight, eps)
    return _launch(qkv, gate, beta, out_gate, *constants, out, None, None)


def kda_verify_step(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    slots: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    starts: torch.Tensor,
    accepted: torch.Tensor,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda_step.reference.kda_verify_step_reference`."""
    constants = (conv_weight, windows, a_log, dt_bias, lower_bound, states, slots, norm_weight, eps)
    return _launch(qkv, gate, beta, out_gate, *constants, None, starts, accepted)
