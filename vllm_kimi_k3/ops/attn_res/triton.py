"""AttnRes as one kernel: a program a token, two passes over its snapshots, the second from cache."""

import torch
import triton
import triton.language as tl

#: Columns of the tile that holds all snapshots of a token while they are scored.
_CHUNK = 1024
#: From this many tokens on, programs of fewer warps fill the GPU better.
_MANY_TOKENS = 1024


@triton.jit(do_not_specialize=["snapshot"])
def _mix(
    stream,
    delta,
    blocks,
    norm_weight,
    proj_weight,
    out_weight,
    out,
    snapshot,
    block_token,
    block_row,
    eps,
    out_eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SEEN: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    KEEP: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    snapshots = blocks + token * block_token
    current = tl.load(stream + token * H + column, mask=inside, other=0.0)
    if ADD:
        pending = tl.load(delta + token * H + column, mask=inside, other=0.0)
        current = (current.to(tl.float32) + pending.to(tl.float32)).to(current.dtype)
        tl.store(stream + token * H + column, current, mask=inside)
    if KEEP:
        tl.store(snapshots + snapshot * block_row + column, current, mask=inside)
    value = current.to(tl.float32)
    if SEEN > 0:
        row = tl.arange(0, ROWS)
        squares = tl.zeros([ROWS, CHUNK], tl.float32)
        products = tl.zeros([ROWS, CHUNK], tl.float32)
        for start in tl.static_range(0, H, CHUNK):
            part = start + tl.arange(0, CHUNK)
            norm = tl.load(norm_weight + part, mask=part < H, other=0.0).to(tl.float32)
            proj = tl.load(proj_weight + part, mask=part < H, other=0.0).to(tl.float32)
            there = (row < SEEN)[:, None] & (part < H)[None, :]
            tile = tl.load(snapshots + row[:, None] * block_row + part[None, :], mask=there, other=0.0).to(tl.float32)
            squares += tile * tile
            products += tile * (norm * proj)[None, :]
        norm = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        proj = tl.load(proj_weight + column, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(products, 1) * tl.rsqrt(tl.sum(squares, 1) / H + eps)
        score = tl.where(row < SEEN, score, float("-inf"))
        own = tl.sum(value * norm * proj, 0) * tl.rsqrt(tl.sum(value * value, 0) / H + eps)
        top = tl.maximum(tl.max(score, 0), own)
        share = tl.exp(score - top)
        own = tl.exp(own - top)
        total = tl.sum(share, 0) + own
        share = share / total
        value = value * (own / total)
        for index in tl.static_range(SEEN):
            tile = tl.load(snapshots + index * block_row + column, mask=inside, other=0.0).to(tl.float32)
            value += tl.sum(tl.where(row == index, share, 0.0), 0) * tile
    mixed = value.to(current.dtype)
    if NORM:
        wide = mixed.to(tl.float32)
        normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / H + out_eps)).to(mixed.dtype)
        weight = tl.load(out_weight + column, mask=inside, other=0.0)
        mixed = (normed.to(tl.float32) * weight.to(tl.float32)).to(mixed.dtype)
    tl.store(out + token * H + column, mixed, mask=inside)


def attn_res_norm(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    seen: int,
    snapshot: int | None,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
    out_weight: torch.Tensor | None,
    out_eps: float,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.attn_res.reference.attn_res_norm_reference`."""
    tokens, hidden = stream.shape
    out = torch.empty_like(stream)
    if tokens == 0:
        return out
    block = triton.next_power_of_2(hidden)
    wide = block >= 4096
    _mix[(tokens,)](
        stream,
        stream if delta is None else delta.contiguous(),
        blocks,
        norm_weight,
        proj_weight,
        norm_weight if out_weight is None else out_weight,
        out,
        snapshot or 0,
        blocks.stride(0),
        blocks.stride(1),
        eps,
        out_eps,
        H=hidden,
        BLOCK=block,
        CHUNK=min(_CHUNK, block),
        SEEN=seen,
        ROWS=triton.next_power_of_2(max(seen, 1)),
        ADD=delta is not None,
        KEEP=snapshot is not None,
        NORM=out_weight is not None,
        num_warps=4 if not wide else 8 if tokens >= _MANY_TOKENS else 16,
    )
    return out
