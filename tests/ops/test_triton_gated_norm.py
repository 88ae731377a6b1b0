"""The gated norm's kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.gated_norm.reference import gated_norm_reference
from vllm_kimi_k3.ops.gated_norm.triton import gated_norm


@pytest.mark.parametrize("shape", [(1, 12, 128), (37, 6, 128), (0, 2, 16), (5, 3, 40)], ids=str)
def test_gated_norm(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tokens, heads, dim = shape
    x, weight = 3 * torch.randn(shape, device=DEVICE), torch.randn(dim, device=DEVICE)
    # The gate is a slice of a wider product, as in the model.
    gate = torch.randn(tokens, heads * dim + 8, device=DEVICE)[:, 8:].unflatten(-1, (heads, dim))
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5), gated_norm_reference(x, gate, weight, 1e-5), **CLOSE)


def test_a_gate_with_other_strides_is_read_right() -> None:
    torch.manual_seed(0)
    x, gate, weight = torch.randn(4, 3, 16), torch.randn(3, 4, 16).transpose(0, 1), torch.ones(16)
    x, gate, weight = (tensor.to(DEVICE) for tensor in (x, gate, weight))
    torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5), gated_norm_reference(x, gate, weight, 1e-5), **CLOSE)
