"""Kimi Delta Attention: the gated delta rule with a decay a channel."""

from typing import Any

import torch

from vllm_kimi_k3.ops.kda.chunk import kda_prefill_chunked
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

_VLLM = "vllm_kimi_k3.compat.kernels"


def _accepts(q: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """A slice of a head's state lies in registers."""
    return q.shape[-1] in (16, 32, 64, 128)


kda_prefill = Operation("kda_prefill", kda_prefill_chunked)
kda_prefill.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.kda.triton", "kda_prefill"), _accepts)
kda_prefill.add(
    "flash_kda",
    kernel(_VLLM, "has_flash_kda"),
    kernel(_VLLM, "flash_kda"),
    kernel(_VLLM, "takes_flash_kda"),
    asked=True,
)
