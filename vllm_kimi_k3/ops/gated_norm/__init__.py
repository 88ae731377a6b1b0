"""RMS norm over a head, then its sigmoid output gate."""

from typing import Any

import torch

from vllm_kimi_k3.ops.gated_norm.reference import gated_norm_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton


def _accepts(x: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return x.ndim == 3


gated_norm = Operation("gated_norm", gated_norm_reference)
gated_norm.add("triton", runs_triton, kernel("vllm_kimi_k3.ops.gated_norm.triton", "gated_norm"), _accepts)
