"""The expert kernels against their reference."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from vllm_kimi_k3.ops.experts.grouping import group
from vllm_kimi_k3.ops.experts.reference import experts_reference
from vllm_kimi_k3.ops.experts.triton import experts, experts_by_pair, experts_by_tile

CLOSE = {"rtol": 1e-4, "atol": 1e-3}


def inputs(tokens: int, count: int, top_k: int, inner: int, latent: int) -> dict[str, torch.Tensor]:
    """Every code, scales from 2^-5 to 2^0."""
    torch.manual_seed(0)

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device=DEVICE)
        return values, torch.randint(122, 128, (count, rows, columns // 32), dtype=torch.uint8, device=DEVICE)

    w13, w13_scale = packed(2 * inner, latent)
    w2, w2_scale = packed(latent, inner)
    chosen = [torch.randperm(count)[:top_k] for _ in range(tokens)]
    return {
        "latent": torch.randn(tokens, latent, device=DEVICE) / 8,
        "ids": torch.stack(chosen).to(DEVICE) if tokens else torch.empty(0, top_k, dtype=torch.int64, device=DEVICE),
        "weights": torch.rand(tokens, top_k, device=DEVICE),
        "w13": w13,
        "w13_scale": w13_scale,
        "w2": w2,
        "w2_scale": w2_scale,
    }


@pytest.mark.parametrize("run", [experts_by_pair, experts_by_tile])
@pytest.mark.parametrize(("inner", "latent"), [(32, 64), (96, 64), (64, 160)])
@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_experts(run, inner: int, latent: int, linear_beta: float | None) -> None:
    given = inputs(3, 5, 2, inner, latent)
    expected = experts_reference(**given, beta=4.0, linear_beta=linear_beta)
    torch.testing.assert_close(run(**given, beta=4.0, linear_beta=linear_beta), expected, **CLOSE)


@pytest.mark.parametrize("tokens", [0, 1, 4, 5, 35])
def test_an_expert_takes_more_tokens_than_a_tile(tokens: int) -> None:
    given = inputs(tokens, 3, 2, 32, 64)
    expected = experts_reference(**given, beta=4.0, linear_beta=25.0)
    torch.testing.assert_close(experts(**given, beta=4.0, linear_beta=25.0), expected, **CLOSE)


@pytest.mark.parametrize(("tokens", "count"), [(1, 896), (40, 7), (70, 20), (66, 896)])
def test_tiles_hold_every_pair_once(tokens: int, count: int) -> None:
    """The last two have more pairs than are compared with each other."""
    torch.manual_seed(0)
    top_k = min(16, count)
    ids = torch.stack([torch.randperm(count)[:top_k] for _ in range(tokens)]).int().to(DEVICE)
    tiles = group(ids, count, 16)
    seen = []
    table = (tiles.expert.tolist(), tiles.first.tolist(), tiles.count.tolist())
    for expert, first, size in zip(*table, strict=True):
        assert size <= 16
        pairs = tiles.members[first : first + size].tolist()
        assert all(ids.flatten()[pair] == expert for pair in pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * top_k))
