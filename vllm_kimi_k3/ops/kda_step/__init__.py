"""The KDA mixer of a decode or verify step as one operation: convolution, gates, delta rule, gated norm."""

from typing import Any

import torch

from vllm_kimi_k3.ops.kda_step import batched
from vllm_kimi_k3.ops.kda_step.reference import kda_decode_step_reference, kda_verify_step_reference
from vllm_kimi_k3.ops.operation import Operation, kernel, runs_triton

_TRITON = "vllm_kimi_k3.ops.kda_step.triton"
_VLLM = "vllm_kimi_k3.compat.kernels"


def _accepts(qkv: torch.Tensor, gate: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """A head's state lies in registers whole, and the window's rows are written out for one width."""
    conv_weight = args[2] if len(args) > 2 else kwargs["conv_weight"]
    return gate.shape[-1] in (16, 32, 64, 128) and conv_weight.shape[1] == 4


kda_decode_step = Operation("kda_decode_step", kda_decode_step_reference)
kda_decode_step.add(
    "vllm",
    kernel(_VLLM, "has_fused_kda_decode"),
    kernel(_VLLM, "fused_kda_decode"),
    kernel(_VLLM, "takes_fused_kda_decode"),
    asked=True,
)
kda_decode_step.add("triton", runs_triton, kernel(_TRITON, "kda_decode_step"), _accepts)
kda_decode_step.add("batched", batched.runs_batched, batched.kda_decode_step)

kda_verify_step = Operation("kda_verify_step", kda_verify_step_reference)
kda_verify_step.add("triton", runs_triton, kernel(_TRITON, "kda_verify_step"), _accepts)
