"""The KDA mixer of a decode step in plain torch, all sequences at once: what a CPU runs."""

import torch

from vllm_kimi_k3.ops.gated_norm.reference import gated_norm_reference
from vllm_kimi_k3.ops.kda.reference import kda_decode_reference
from vllm_kimi_k3.ops.short_conv.reference import short_conv_decode_reference


def runs_batched(device: torch.device) -> bool:
    """Whether :func:`kda_decode_step` is for a device; it knows no padded rows, which only graphs on a GPU have."""
    return device.type == "cpu"


def kda_decode_step(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    pages: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda_step.reference.kda_decode_step_reference`, without padded rows."""
    heads, dim = gate.shape[-2:]
    q, k, v = short_conv_decode_reference(qkv, conv_weight, windows, pages).view(-1, 3, heads, dim).unbind(1)
    mixed = kda_decode_reference(q, k, v, gate, beta, a_log, dt_bias, lower_bound, states, pages)
    result = gated_norm_reference(mixed, out_gate.view(gate.shape), norm_weight, eps)
    return result if out is None else out.copy_(result)
