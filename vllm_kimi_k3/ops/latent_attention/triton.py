"""Attention over paged latent rows: a program a tile of (token, head) rows of a sequence.

All heads read the same cached rows, so the heads of a token fill a tile of the matrix units even in decode. A program
walks its sequence from the first row to its last query's position with a running softmax. A decode step has few tiles:
there a sequence's rows are cut into parts that are walked side by side, and a second kernel adds them up.
"""

import torch
import triton
import triton.language as tl

#: (token, head) rows of a tile.
_ROWS = 16
#: Programs of a decode step, about: enough for every GPU, and no more partial results than are worth adding up.
_PROGRAMS = 256
#: Most parts of a sequence, a power of two.
_PARTS = tl.constexpr(64)
#: Fewest cached rows of a part, a multiple of the rows that a step of the walk reads.
_LEAST = tl.constexpr(256)


@triton.jit
def _part(length, parts):
    """Cached rows of a part of a sequence."""
    return tl.cdiv(tl.cdiv(length, parts), _LEAST) * _LEAST


@triton.jit(do_not_specialize=["parts", "table_row"])
def _attend(
    query,
    cache,
    table,
    starts,
    lengths,
    out,
    weight,
    query_token,
    query_head,
    cache_block,
    cache_row,
    table_row,
    parts,
    scale,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Whole, ``out`` is [T, H, RANK]; split, it is [N, H, parts, RANK] in fp32 and ``weight`` [N, H, parts] gets the
    logarithms of the sums of exponentials.
    """
    sequence = tl.program_id(1)
    first = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - first
    tile = tl.program_id(0) * ROWS
    if tile >= count * HEADS:
        return
    length = tl.load(lengths + sequence)
    row = tile + tl.arange(0, ROWS)
    token = row // HEADS
    head = row % HEADS
    there = token < count
    position = length - count + token
    reach = length - count + tl.minimum((tile + ROWS - 1) // HEADS, count - 1) + 1
    begin = 0
    if SPLIT:
        size = _part(length, parts)
        begin = tl.program_id(2) * size
        if begin >= reach:
            return
        reach = tl.minimum(reach, begin + size)

    wide = tl.arange(0, RANK_BLOCK)
    narrow = tl.arange(0, ROPE_BLOCK)
    mine = query + (first + token).to(tl.int64) * query_token + head * query_head
    in_rank = wide < RANK
    in_rope = narrow < ROPE
    q_latent = tl.load(mine[:, None] + wide[None, :], mask=there[:, None] & in_rank[None, :], other=0.0)
    q_rope = tl.load(mine[:, None] + RANK + narrow[None, :], mask=there[:, None] & in_rope[None, :], other=0.0)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_BLOCK], tl.float32)
    for start in range(begin, reach, KEYS):
        key = start + tl.arange(0, KEYS)
        known = key < reach
        block = tl.load(table + sequence * table_row + key // PAGE, mask=known, other=0).to(tl.int64)
        at = cache + block * cache_block + (key % PAGE) * cache_row
        latent = tl.load(at[:, None] + wide[None, :], mask=known[:, None] & in_rank[None, :], other=0.0)
        rope = tl.load(at[:, None] + RANK + narrow[None, :], mask=known[:, None] & in_rope[None, :], other=0.0)
        score = tl.dot(q_latent, tl.trans(latent), input_precision=PRECISION)
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision=PRECISION) * scale
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        # A padded row has seen no key yet when its tile's keys all lie behind it; its values are not stored.
        best = tl.maximum(tl.maximum(top, tl.max(score, 1)), -1e30)
        share = tl.exp(score - best[:, None])
        shrink = tl.exp(top - best)
        total = total * shrink + tl.sum(share, 1)
        mixed = tl.dot(share.to(latent.dtype), latent, mixed * shrink[:, None], input_precision=PRECISION)
        top = best
    mixed = mixed / total[:, None]
    if SPLIT:
        at = (sequence.to(tl.int64) * HEADS + head) * parts + tl.program_id(2)
        tl.store(weight + at, top + tl.log(total), mask=there)
    else:
        at = (first + token).to(tl.int64) * HEADS + head
    target = out + at * RANK
    tl.store(target[:, None] + wide[None, :], mixed.to(out.dtype.element_ty), mask=there[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["sequences", "parts"])
def _sum_up(
    results,
    weight,
    starts,
    lengths,
    out,
    sequences,
    parts,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    """A head of a token from its sequence's parts; padding is zeroed."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    wide = tl.arange(0, RANK_BLOCK)
    if row >= tl.load(starts + sequences):
        target = out + (row.to(tl.int64) * HEADS + head) * RANK
        tl.store(target + wide, tl.zeros([RANK_BLOCK], out.dtype.element_ty), mask=wide < RANK)
    if row < sequences:
        first = tl.load(starts + row)
        if tl.load(starts + row + 1) > first:
            length = tl.load(lengths + row)
            used = tl.cdiv(length, _part(length, parts))
            at = (row.to(tl.int64) * HEADS + head) * parts
            place = tl.arange(0, _PARTS)
            share = tl.load(weight + at + place, mask=place < used, other=float("-inf"))
            share = tl.exp(share - tl.max(share, 0))
            share = share / tl.sum(share, 0)
            total = tl.zeros([RANK_BLOCK], tl.float32)
            for index in range(used):
                part = tl.load(results + (at + index) * RANK + wide, mask=wide < RANK, other=0.0)
                total += part * tl.sum(tl.where(place == index, share, 0.0), 0)
            target = out + (first.to(tl.int64) * HEADS + head) * RANK
            tl.store(target + wide, total.to(out.dtype.element_ty), mask=wide < RANK)


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    rank: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """As :func:`~vllm_kimi_k3.ops.latent_attention.reference.latent_attention_reference`."""
    tokens, heads, width = query.shape
    sequences = lengths.shape[0]
    decode = longest == 1
    if not decode:
        out.zero_()
    if tokens == 0 or sequences == 0:
        return
    rank_block = max(16, triton.next_power_of_2(rank))
    tiles = triton.cdiv(longest * heads, _ROWS)
    parts, target, weight = 1, out, out
    if decode:
        parts = max(1, min(_PARTS.value, _PROGRAMS // (tiles * sequences)))
        target = torch.empty(sequences, heads, parts, rank, dtype=torch.float32, device=out.device)
        weight = torch.empty(sequences, heads, parts, dtype=torch.float32, device=out.device)
    _attend[(tiles, sequences, parts)](
        query,
        cache,
        block_table,
        starts,
        lengths,
        target,
        weight,
        query.stride(0),
        query.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        parts,
        scale,
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        RANK_BLOCK=rank_block,
        ROPE_BLOCK=max(16, triton.next_power_of_2(width - rank)),
        PAGE=cache.shape[1],
        ROWS=_ROWS,
        KEYS=64 if rank_block <= 128 else 32,
        SPLIT=decode,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    if decode:
        _sum_up[(max(tokens, sequences), heads)](
            target,
            weight,
            starts,
            lengths,
            out,
            sequences,
            parts,
            HEADS=heads,
            RANK=rank,
            RANK_BLOCK=rank_block,
            num_warps=1 if rank_block <= 128 else 4,
        )


@triton.jit
def _store(
    latent, shared_key, cache, slots, latent_row, key_row, cache_block, cache_row,
    RANK: tl.constexpr, ROPE: tl.constexpr, RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    at = cache + (slot // PAGE) * cache_block + (slot % PAGE) * cache_row
    wide = tl.arange(0, RANK_BLOCK)
    narrow = tl.arange(0, ROPE_BLOCK)
    kind = cache.dtype.element_ty
    value = tl.load(latent + token * latent_row + wide, mask=wide < RANK)
    tl.store(at + wide, value.to(kind), mask=wide < RANK)
    value = tl.load(shared_key + token * key_row + narrow, mask=narrow < ROPE)
    tl.store(at + RANK + narrow, value.to(kind), mask=narrow < ROPE)


def store_rows(latent: torch.Tensor, shared_key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As :func:`~vllm_kimi_k3.ops.latent_attention.reference.store_rows_reference`."""
    tokens, rank = latent.shape
    rope = shared_key.shape[1]
    if tokens == 0:
        return
    _store[(tokens,)](
        latent,
        shared_key,
        cache,
        slots,
        latent.stride(0),
        shared_key.stride(0),
        cache.stride(0),
        cache.stride(1),
        RANK=rank,
        ROPE=rope,
        RANK_BLOCK=triton.next_power_of_2(rank),
        ROPE_BLOCK=triton.next_power_of_2(rope),
        PAGE=cache.shape[1],
        num_warps=1,
    )
