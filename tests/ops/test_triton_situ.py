"""The SiTU kernel against its reference."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from vllm_kimi_k3.ops.situ.reference import situ_reference
from vllm_kimi_k3.ops.situ.triton import situ


@pytest.mark.parametrize("linear_beta", [25.0, None])
@pytest.mark.parametrize("shape", [(1, 768), (0, 12), (3, 2, 2050)], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_situ(shape: tuple[int, ...], linear_beta: float | None, size: float) -> None:
    torch.manual_seed(0)
    gate_up = size * torch.randn(shape, device=DEVICE)
    expected = situ_reference(gate_up.double(), 4.0, linear_beta).float()
    torch.testing.assert_close(situ(gate_up, 4.0, linear_beta), expected, rtol=1e-5, atol=0)
