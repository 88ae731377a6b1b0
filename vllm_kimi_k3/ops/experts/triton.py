"""Routed experts from their MXFP4 bytes, in the published layout.

Few tokens: every (token, expert) pair multiplies its expert's rows itself, gate and up then SiTU in one launch, down
with the weighted sum over the token's experts in a second. More tokens: pairs of one expert are multiplied together on
the matrix units, so that an expert's bytes are read once. A byte holds an even and an odd column, so a product is the
low values by the even columns plus the high values by the odd ones: inputs are kept with even columns first.
"""

import torch
import triton
import triton.language as tl

from vllm_kimi_k3.ops.experts.grouping import group
from vllm_kimi_k3.ops.mxfp4.triton import UNBIAS, raw, scaled, scales
from vllm_kimi_k3.ops.situ.triton import situ_value

#: Up to so many tokens every pair reads its expert itself.
FEW_TOKENS = 4


@triton.jit
def _pair_gate_up(
    x,
    ids,
    packed,
    scale,
    act,
    x_stride,
    beta,
    linear_beta,
    TOP_K: tl.constexpr,
    LATENT: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    BOUND_UP: tl.constexpr,
    PTX: tl.constexpr,
):
    """SiTU of ``ROWS`` gate and up rows of one pair's expert."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair).to(tl.int64)
    inputs = x + (pair // TOP_K).to(tl.int64) * x_stride
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, 16)
    gate_sum = tl.zeros([ROWS, GROUPS], tl.float32)
    up_sum = tl.zeros([ROWS, GROUPS], tl.float32)
    first_row = expert * (2 * INNER) + row
    for start in tl.static_range(0, LATENT // 32, GROUPS):
        column = start + group
        there = (row < INNER)[:, None] & (column < LATENT // 32)[None, :]
        place = first_row[:, None] * (LATENT // 2) + (column * 16)[None, :]
        place = place[:, :, None] + byte[None, None, :]
        gate_low, gate_high = raw(tl.load(packed + place, mask=there[:, :, None], other=0), PTX)
        up_low, up_high = raw(tl.load(packed + place + INNER * (LATENT // 2), mask=there[:, :, None], other=0), PTX)
        place = first_row[:, None] * (LATENT // 32) + column[None, :]
        gate_scale = scales(tl.load(scale + place, mask=there, other=0))
        up_scale = scales(tl.load(scale + place + INNER * (LATENT // 32), mask=there, other=0))
        element = (column * 32)[:, None, None] + (byte * 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
        both = tl.load(inputs + element, mask=element < LATENT, other=0.0).to(tl.float32)
        even, odd = tl.split(both)
        even = even[None, :, :]
        odd = odd[None, :, :]
        gate_sum += tl.sum(gate_low * even + gate_high * odd, 2) * gate_scale
        up_sum += tl.sum(up_low * even + up_high * odd, 2) * up_scale
    kind = x.dtype.element_ty
    gate = (tl.sum(gate_sum, 1) * UNBIAS).to(kind).to(tl.float32)
    up = (tl.sum(up_sum, 1) * UNBIAS).to(kind).to(tl.float32)
    value = situ_value(gate, up, beta, linear_beta, BOUND_UP)
    tl.store(act + pair * INNER + row, value.to(kind), mask=row < INNER)


@triton.jit
def _pair_down(
    act,
    ids,
    weights,
    packed,
    scale,
    out,
    TOP_K: tl.constexpr,
    LATENT: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PTX: tl.constexpr,
):
    """``ROWS`` rows of one token's weighted sum over its experts."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.arange(0, GROUPS)
    byte = tl.arange(0, 16)
    there = (row < LATENT)[:, None] & (group < INNER // 32)[None, :]
    total = tl.zeros([ROWS, GROUPS], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        first_row = expert * LATENT + row
        place = first_row[:, None] * (INNER // 2) + (group * 16)[None, :]
        place = place[:, :, None] + byte[None, None, :]
        low, high = raw(tl.load(packed + place, mask=there[:, :, None], other=0), PTX)
        place = first_row[:, None] * (INNER // 32) + group[None, :]
        factor = scales(tl.load(scale + place, mask=there, other=0))
        element = (group * 32)[:, None, None] + (byte * 2)[None, :, None] + tl.arange(0, 2)[None, None, :]
        both = tl.load(act + pair * INNER + element, mask=element < INNER, other=0.0).to(tl.float32)
        even, odd = tl.split(both)
        total += tl.sum(low * even[None, :, :] + high * odd[None, :, :], 2) * (factor * weight)
    value = tl.sum(total, 1) * UNBIAS
    tl.store(out + token.to(tl.int64) * LATENT + row, value.to(out.dtype.element_ty), mask=row < LATENT)


@triton.jit
def _evens_first(x, out, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of a row: even ones, then odd ones."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside)
    tl.store(out + row * WIDTH + (column % 2) * (WIDTH // 2) + column // 2, value, mask=inside)


@triton.jit
def _product(
    x,
    row_of,
    packed,
    scale,
    weight_row,
    weight_there,
    count,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """[ROWS, WIDTH] fp32: rows of packed weights by rows of x, which has its even columns first."""
    column = tl.arange(0, BYTES)
    group = tl.arange(0, BYTES // 16)
    taken = tl.arange(0, WIDTH) < count
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    bytes_at = packed + weight_row[:, None] * (DEPTH // 2) + column[None, :]
    scales_at = scale + weight_row[:, None] * (DEPTH // 32) + group[None, :]
    inputs_at = x + row_of[None, :] * DEPTH + column[:, None]
    for start in range(0, DEPTH // 2, BYTES):
        byte = tl.load(bytes_at + start, mask=weight_there[:, None], other=0)
        factor = scales(tl.load(scales_at + start // 16, mask=weight_there[:, None], other=0))
        factor = tl.broadcast_to(factor[:, :, None], [ROWS, BYTES // 16, 16])
        low, high = scaled(byte, tl.reshape(factor, [ROWS, BYTES]), x.dtype.element_ty, PTX)
        even = tl.load(inputs_at + start, mask=taken[None, :], other=0.0)
        odd = tl.load(inputs_at + (start + DEPTH // 2), mask=taken[None, :], other=0.0)
        total = tl.dot(low, even, total, input_precision=PRECISION)
        total = tl.dot(high, odd, total, input_precision=PRECISION)
    return total * UNBIAS


@triton.jit
def _tile_gate_up(
    x,
    expert_of,
    first,
    counts,
    members,
    packed,
    scale,
    act,
    beta,
    linear_beta,
    TOP_K: tl.constexpr,
    LATENT: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    BOUND_UP: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """SiTU of ``ROWS`` gate and as many up rows of one expert, for a tile's pairs."""
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    if count == 0:
        return
    expert = tl.load(expert_of + tile).to(tl.int64)
    place = tl.arange(0, WIDTH)
    pair = tl.load(members + tl.load(first + tile) + place, mask=place < count, other=0).to(tl.int64)
    both = tl.arange(0, 2 * ROWS)
    row = tl.program_id(0) * ROWS + both % ROWS
    weight_row = expert * (2 * INNER) + (both // ROWS) * INNER + row
    total = _product(
        x, pair // TOP_K, packed, scale, weight_row, row < INNER, count, LATENT, 2 * ROWS, WIDTH, BYTES, PRECISION, PTX
    )
    kind = act.dtype.element_ty
    total = total.to(kind).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, ROWS, WIDTH]), [1, 2, 0]))
    value = situ_value(gate, up, beta, linear_beta, BOUND_UP).to(kind)
    column = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    target = (column % 2) * (INNER // 2) + column // 2
    there = (column < INNER)[:, None] & (place < count)[None, :]
    tl.store(act + pair[None, :] * INNER + target[:, None], value, mask=there)


@triton.jit
def _tile_down(
    act,
    expert_of,
    first,
    counts,
    members,
    packed,
    scale,
    out,
    LATENT: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """``ROWS`` rows of one expert's output, for a tile's pairs."""
    tile = tl.program_id(1)
    count = tl.load(counts + tile)
    if count == 0:
        return
    expert = tl.load(expert_of + tile).to(tl.int64)
    place = tl.arange(0, WIDTH)
    pair = tl.load(members + tl.load(first + tile) + place, mask=place < count, other=0).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    weight_row = expert * LATENT + row
    total = _product(
        act, pair, packed, scale, weight_row, row < LATENT, count, INNER, ROWS, WIDTH, BYTES, PRECISION, PTX
    )
    there = (row < LATENT)[:, None] & (place < count)[None, :]
    tl.store(out + pair[None, :] * LATENT + row[:, None], total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _weighted_sum(parts, weights, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        part = tl.load(parts + pair * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += part * tl.load(weights + pair)
    tl.store(out + token * WIDTH + column, total.to(out.dtype.element_ty), mask=inside)


def _depth(columns: int) -> int:
    """Bytes a step of a product over so many columns: a power of two that divides them."""
    half = columns // 2
    return min(128, half & -half)


def tile_width(tokens: int, top_k: int, experts: int) -> int:
    """Pairs a tile: about what an expert gets, where tokens choose evenly."""
    each = tokens * top_k / experts
    return 16 if each <= 12 else 32 if each <= 40 else 64


def experts_by_pair(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float,
    linear_beta: float | None,
    rows: int = 16,
) -> torch.Tensor:
    """As the reference; reads an expert once for every token that chose it.

    Args:
        rows: rows of a matrix that one program multiplies.
    """
    tokens, top_k = ids.shape
    width, inner = latent.shape[1], w13.shape[1] // 2
    act = torch.empty(tokens * top_k, inner, dtype=latent.dtype, device=latent.device)
    out = torch.empty(tokens, width, dtype=latent.dtype, device=latent.device)
    ptx = latent.is_cuda and torch.version.cuda is not None
    _pair_gate_up[(triton.cdiv(inner, rows), tokens * top_k)](
        latent,
        ids,
        w13,
        w13_scale,
        act,
        latent.stride(0),
        float(beta),
        float(linear_beta or 1.0),
        TOP_K=top_k,
        LATENT=width,
        INNER=inner,
        ROWS=rows,
        GROUPS=min(16, triton.next_power_of_2(width // 32)),
        BOUND_UP=linear_beta is not None,
        PTX=ptx,
        num_warps=4,
    )
    _pair_down[(triton.cdiv(width, rows), tokens)](
        act,
        ids,
        weights,
        w2,
        w2_scale,
        out,
        TOP_K=top_k,
        LATENT=width,
        INNER=inner,
        ROWS=rows,
        GROUPS=triton.next_power_of_2(inner // 32),
        PTX=ptx,
        num_warps=4,
    )
    return out


def experts_by_tile(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float,
    linear_beta: float | None,
    width: int | None = None,
    rows: int = 64,
    warps: int = 4,
    stages: int = 4,
) -> torch.Tensor:
    """As the reference; reads an expert once for every tile of tokens that chose it.

    Args:
        width: pairs a tile, a power of two from 16; None chooses.
        rows: rows of a matrix that one program multiplies, a power of two.
        warps, stages: of the kernels.
    """
    tokens, top_k = ids.shape
    count, columns, inner = w13.shape[0], latent.shape[1], w13.shape[1] // 2
    device, kind = latent.device, latent.dtype
    tiles = group(ids, count, width or tile_width(tokens, top_k, count))
    ptx = latent.is_cuda and torch.version.cuda is not None and kind == torch.bfloat16
    precision = "ieee" if kind == torch.float32 else "tf32"

    x = torch.empty(tokens, columns, dtype=kind, device=device)
    block = min(1024, triton.next_power_of_2(columns))
    _evens_first[(tokens, triton.cdiv(columns, block))](latent, x, latent.stride(0), WIDTH=columns, BLOCK=block)
    act = torch.empty(tokens * top_k, inner, dtype=kind, device=device)
    parts = torch.empty(tokens * top_k, columns, dtype=kind, device=device)
    table = (tiles.expert, tiles.first, tiles.count, tiles.members)
    entries = tiles.expert.shape[0]
    _tile_gate_up[(triton.cdiv(inner, rows // 2), entries)](
        x,
        *table,
        w13,
        w13_scale,
        act,
        float(beta),
        float(linear_beta or 1.0),
        TOP_K=top_k,
        LATENT=columns,
        INNER=inner,
        ROWS=rows // 2,
        WIDTH=tiles.width,
        BYTES=_depth(columns),
        BOUND_UP=linear_beta is not None,
        PRECISION=precision,
        PTX=ptx,
        num_warps=warps,
        num_stages=stages,
    )
    _tile_down[(triton.cdiv(columns, rows), entries)](
        act,
        *table,
        w2,
        w2_scale,
        parts,
        LATENT=columns,
        INNER=inner,
        ROWS=rows,
        WIDTH=tiles.width,
        BYTES=_depth(inner),
        PRECISION=precision,
        PTX=ptx,
        num_warps=warps,
        num_stages=stages,
    )
    out = torch.empty(tokens, columns, dtype=kind, device=device)
    _weighted_sum[(tokens, triton.cdiv(columns, block))](parts, weights, out, TOP_K=top_k, WIDTH=columns, BLOCK=block)
    return out


def experts(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float,
    linear_beta: float | None,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.experts.reference.experts_reference`."""
    if latent.shape[0] == 0:
        return torch.empty_like(latent)
    run = experts_by_pair if latent.shape[0] <= FEW_TOKENS else experts_by_tile
    return run(latent, ids, weights, w13, w13_scale, w2, w2_scale, beta, linear_beta)
