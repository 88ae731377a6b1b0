"""The AttnRes kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.attn_res.reference import attn_res_norm_reference
from vllm_kimi_k3.ops.attn_res.triton import attn_res_norm

SITES = {
    "first": {"seen": 0, "snapshot": 0, "pending": False, "norm": True},
    "inside a block": {"seen": 1, "snapshot": None, "pending": True, "norm": True},
    "block start": {"seen": 3, "snapshot": 3, "pending": True, "norm": True},
    "after a block start": {"seen": 5, "snapshot": None, "pending": False, "norm": True},
    "last": {"seen": 8, "snapshot": None, "pending": True, "norm": False},
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 7168), (3, 48), (0, 48), (2, 1025)])
def test_site(site: str, tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    case = SITES[site]
    stream, delta = torch.randn(2, tokens, hidden, device=DEVICE)
    blocks = torch.randn(tokens, 8, hidden, device=DEVICE)
    norm, proj, out = torch.randn(3, hidden, device=DEVICE)
    weights = (norm, proj[None] / hidden**0.5, 1e-5, out if case["norm"] else None, 1e-6)
    delta = delta if case["pending"] else None
    expected_stream, expected_blocks = stream.clone(), blocks.clone()
    expected = attn_res_norm_reference(
        expected_stream, delta, expected_blocks, case["seen"], case["snapshot"], *weights
    )
    result = attn_res_norm(stream, delta, blocks, case["seen"], case["snapshot"], *weights)
    torch.testing.assert_close(result, expected, **CLOSE)
    torch.testing.assert_close(stream, expected_stream)
    torch.testing.assert_close(blocks, expected_blocks)


def test_one_source_far_above_the_others_takes_all() -> None:
    prefix = torch.zeros(1, 64, device=DEVICE)
    blocks = torch.stack([torch.ones(64), -torch.ones(64)])[None].to(DEVICE)
    norm, proj = torch.ones(64, device=DEVICE), 100 * torch.ones(1, 64, device=DEVICE)
    mixed = attn_res_norm(prefix, None, blocks, 2, None, norm, proj, 1e-5, None, 1e-5)
    torch.testing.assert_close(mixed, torch.ones(1, 64, device=DEVICE))
