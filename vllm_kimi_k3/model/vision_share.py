"""The images of a step, dealt out over the tensor-parallel ranks: each embeds some, all get all."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vllm_kimi_k3.model.vision import Grid, Projector, VisionTower


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Which items each rank takes, in order: the costliest first, each to the rank that has the least so far."""
    loads, shares = [0] * ranks, [list[int]() for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        rank = loads.index(min(loads))
        loads[rank] += costs[item]
        shares[rank].append(item)
    return [sorted(share) for share in shares]


def embed_images(
    tower: VisionTower,
    projector: Projector,
    patches: Tensor,
    grids: Sequence[Grid],
    rank: int = 0,
    ranks: int = 1,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """The embeddings of each image, [tokens, H] each, the same on every rank.

    Args:
        patches: uint8 [L, 3, 14, 14] of all images, one after the other.
        rank, ranks: this process's place in the tensor-parallel group.
        gather: joins a [rows, H] of every rank, in rank order, to [ranks * rows, H].
    """
    # The cost of a patch grows with the image: attention costs as much as all else at 6 * width patches.
    costs = [grid.patches * (grid.patches + 6 * tower.qkv_width) for grid in grids]
    shares = deal(costs, ranks)
    images = patches.split([grid.patches for grid in grids])
    mine = shares[rank]
    if mine:
        own = [grids[item] for item in mine]
        embedded = projector(tower(torch.cat([images[item] for item in mine]), own), own)
    else:
        embedded = projector.post_norm.weight.new_zeros(0, projector.width)
    if gather is not None:
        rows = [sum(projector.tokens(grids[item]) for item in share) for share in shares]
        most = max(rows)
        padded = embedded.new_zeros(most, projector.width)
        padded[: len(embedded)] = embedded
        parts = gather(padded).split(most)
        embedded = torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])
    order = [item for share in shares for item in share]
    found = embedded.split([projector.tokens(grids[item]) for item in order])
    return [tensor for _, tensor in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]
