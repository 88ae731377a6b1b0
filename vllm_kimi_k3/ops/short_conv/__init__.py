"""The short causal convolution before KDA."""

from typing import Any

import torch

from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton
from vllm_kimi_k3.ops.short_conv.reference import short_conv_prefill_reference


def _accepts(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return weight.shape[1] <= 8


short_conv_prefill = Operation("short_conv_prefill", short_conv_prefill_reference)
short_conv_prefill.add(
    "triton", runs_triton, kernel("vllm_kimi_k3.ops.short_conv.triton", "short_conv_prefill"), _accepts
)
