"""The AttnRes kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.attn_res.reference import attn_res_norm_reference, attn_res_reference
from vllm_kimi_k3.ops.attn_res.triton import attn_res, attn_res_norm

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


@pytest.mark.parametrize("snapshots", [0, 1, 7])
def test_mix_alone_reads_a_slice_of_the_snapshots(snapshots: int) -> None:
    torch.manual_seed(0)
    prefix, blocks = torch.randn(5, 96, device=DEVICE), torch.randn(5, 8, 96, device=DEVICE)[:, :snapshots]
    norm, proj = torch.randn(96, device=DEVICE), torch.randn(1, 96, device=DEVICE)
    expected = attn_res_reference(prefix, blocks, norm, proj, 1e-5)
    torch.testing.assert_close(attn_res(prefix, blocks, norm, proj, 1e-5), expected, **CLOSE)


def test_one_source_far_above_the_others_takes_all() -> None:
    prefix = torch.zeros(1, 64, device=DEVICE)
    blocks = torch.stack([torch.ones(64), -torch.ones(64)])[None].to(DEVICE)
    norm, proj = torch.ones(64, device=DEVICE), 100 * torch.ones(1, 64, device=DEVICE)
    torch.testing.assert_close(attn_res(prefix, blocks, norm, proj, 1e-5), torch.ones(1, 64, device=DEVICE))
