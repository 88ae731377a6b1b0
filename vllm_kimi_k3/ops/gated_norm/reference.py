"""Gated RMS norm in plain torch."""

import torch


def gated_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``rms_norm(x) * weight * sigmoid(gate)`` in fp32, rounded once at the end.

    Args:
        x: [..., D].
        gate: [..., D].
        weight: [D].
        eps: of the norm.

    Returns:
        [..., D] in x's dtype.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float() * torch.sigmoid(gate.float())).to(x.dtype)
