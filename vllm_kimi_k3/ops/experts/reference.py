"""Routed experts in plain torch: one expert after the other, each dequantised when a token needs it."""

import torch
import torch.nn.functional as F

from vllm_kimi_k3.ops.mxfp4 import dequantise
from vllm_kimi_k3.ops.situ.reference import situ_reference


def experts_reference(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    beta: float,
    linear_beta: float | None,
) -> torch.Tensor:
    """``sum_e weight_e * w2_e(SiTU(w13_e latent))``; expert outputs in the input's dtype, their sum in fp32.

    Args:
        latent: [T, L].
        ids: [T, K] int64, experts of a token.
        weights: [T, K] fp32.
        w13: uint8 [E, 2I, L/2], gate rows before up rows.
        w13_scale: uint8 [E, 2I, L/32].
        w2: uint8 [E, L, I/2].
        w2_scale: uint8 [E, L, I/32].
        beta, linear_beta: of SiTU.

    Returns:
        [T, L] in the input's dtype.
    """
    total = torch.zeros_like(latent, dtype=torch.float32)
    for expert in torch.unique(ids).tolist():
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        gate_up = F.linear(latent[token], dequantise(w13[expert], w13_scale[expert], latent.dtype))
        out = F.linear(
            situ_reference(gate_up, beta, linear_beta), dequantise(w2[expert], w2_scale[expert], latent.dtype)
        )
        total.index_add_(0, token, out.float() * weights[token, slot, None])
    return total.to(latent.dtype)
