"""The router kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from vllm_kimi_k3.ops.router.reference import router_reference, select_reference
from vllm_kimi_k3.ops.router.triton import router, select


def dense(ids: torch.Tensor, weights: torch.Tensor, experts: int) -> torch.Tensor:
    """Weight of every expert, so that the order of the chosen ones does not count."""
    return torch.zeros(ids.shape[0], experts, device=ids.device).scatter(1, ids.long(), weights)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 896, 16), (5, 896, 16), (0, 896, 16), (7, 24, 3)])
def test_select(tokens: int, experts: int, top_k: int) -> None:
    torch.manual_seed(0)
    logits, bias = 3 * torch.randn(tokens, experts, device=DEVICE), torch.randn(experts, device=DEVICE)
    ids, weights = select(logits, bias, top_k, 1.5)
    expected = dense(*select_reference(logits, bias, top_k, 1.5), experts)
    torch.testing.assert_close(dense(ids, weights, experts), expected, rtol=1e-5, atol=1e-7)


def test_negative_scores_and_ties_choose_distinct_experts() -> None:
    logits, bias = torch.zeros(2, 40, device=DEVICE), torch.full((40,), -3.0, device=DEVICE)
    bias[17] = -2.0
    ids, weights = select(logits, bias, 4, 1.0)
    assert ids.tolist() == [[17, 0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 0.25, device=DEVICE))


def test_ids_stay_in_range_when_logits_are_not_finite() -> None:
    logits = torch.full((1, 40), float("nan"), device=DEVICE)
    ids, _ = select(logits, torch.zeros(40, device=DEVICE), 4, 1.0)
    assert ids.min() >= 0 and ids.max() < 40


def test_router() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 24, device=DEVICE), torch.randn(16, 24, device=DEVICE)
    bias = torch.randn(16, device=DEVICE)
    expected = dense(*router_reference(x, weight, bias, 4, 1.0), 16)
    torch.testing.assert_close(dense(*router(x, weight, bias, 4, 1.0), 16), expected)
