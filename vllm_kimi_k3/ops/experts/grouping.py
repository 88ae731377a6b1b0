"""Which tokens go through an expert together: tiles of at most N (token, slot) pairs that chose one expert.

A tile is an entry in three int32 tensors: its expert, where its pairs begin in the list of members, and how many it
has; an entry with none is skipped by the kernels. The host never waits for a count.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Up to here every pair looks at all others, which is one launch; beyond, pairs are sorted.
_FEW_PAIRS = 1024


@dataclass
class Tiles:
    """Tiles of pairs.

    Attributes:
        expert, first, count: [tiles] int32.
        members: int32, pair numbers: token * top_k + slot.
        width: N, the largest count.
    """

    expert: torch.Tensor
    first: torch.Tensor
    count: torch.Tensor
    members: torch.Tensor
    width: int


@triton.jit
def _compare(ids, expert, first, count, members, PAIRS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
             WIDTH: tl.constexpr):  # fmt: skip
    pair = tl.program_id(0)
    own = tl.load(ids + pair).to(tl.int32)
    other = tl.arange(0, BLOCK)
    same = tl.load(ids + other, mask=other < PAIRS, other=-1).to(tl.int32) == own
    leader = tl.min(tl.where(same, other, BLOCK), 0)
    place = tl.sum((same & (other < pair)).to(tl.int32), 0)
    total = tl.sum(same.to(tl.int32), 0)
    tl.store(members + leader * MOST + place, pair)
    tl.store(expert + pair, own)
    tl.store(first + pair, leader * MOST + place)
    tl.store(count + pair, tl.where(place % WIDTH == 0, tl.minimum(total - place, WIDTH), 0))


@triton.jit
def _cut(bounds, expert, first, count, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    own = tl.program_id(0)
    before = tl.arange(0, BLOCK)
    low = tl.load(bounds + before, mask=before < own, other=0)
    high = tl.load(bounds + before + 1, mask=before < own, other=0)
    tile = tl.sum((high - low + WIDTH - 1) // WIDTH, 0)
    begin = tl.load(bounds + own)
    end = tl.load(bounds + own + 1)
    for start in range(begin, end, WIDTH):
        tl.store(expert + tile, own)
        tl.store(first + tile, start)
        tl.store(count + tile, tl.minimum(end - start, WIDTH))
        tile += 1


def group(ids: torch.Tensor, experts: int, width: int) -> Tiles:
    """Tiles of all pairs.

    Args:
        ids: [T, K] int, the experts of a token, distinct within it, all below ``experts``.
        experts: E.
        width: most pairs of a tile.
    """
    tokens, top_k = ids.shape
    pairs, device = tokens * top_k, ids.device
    if pairs <= _FEW_PAIRS:
        expert, first, count = torch.empty(3, pairs, dtype=torch.int32, device=device)
        members = torch.empty(pairs * tokens, dtype=torch.int32, device=device)
        block = triton.next_power_of_2(pairs)
        _compare[(pairs,)](
            ids, expert, first, count, members, PAIRS=pairs, BLOCK=block, MOST=tokens, WIDTH=width, num_warps=1
        )
        return Tiles(expert, first, count, members, width)
    ordered, order = ids.flatten().sort()
    steps = torch.arange(experts + 1, dtype=ids.dtype, device=device)
    bounds = torch.searchsorted(ordered, steps, out_int32=True)
    expert, first, count = torch.zeros(3, pairs // width + min(experts, pairs), dtype=torch.int32, device=device)
    _cut[(experts,)](
        bounds, expert, first, count, EXPERTS=experts, BLOCK=triton.next_power_of_2(experts), WIDTH=width, num_warps=1
    )
    return Tiles(expert, first, count, order.int(), width)
