"""The rotary kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from vllm_kimi_k3.ops.rotary.reference import rotary_reference
from vllm_kimi_k3.ops.rotary.triton import rotary


@pytest.mark.parametrize(
    ("patches", "heads", "dim"), [(0, 2, 8), (1, 1, 4), (5, 3, 24), (64, 12, 128), (131, 2, 64)], ids=str
)
def test_rotary(patches: int, heads: int, dim: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(patches, 3, heads, dim, device=DEVICE)
    angles = 500 * torch.rand(patches, dim // 2, device=DEVICE)
    given, expected = (angles.cos(), angles.sin()), qkv.clone()
    rotary_reference(expected, *given)
    found = qkv.clone()
    rotary(found, *given)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[:, 2], qkv[:, 2])
    assert patches == 0 or not torch.equal(expected[:, :2], qkv[:, :2])
