"""MXFP4 quantisation-aware weights: what the packed checkpoint holds, with the gradient passed straight through."""

import torch
from torch import Tensor

_GROUP = 32


def rounded(weight: Tensor) -> Tensor:
    """``weight`` fp32 [..., columns] rounded to MXFP4 and back, as :func:`vllm_kimi_k3.reference.mxfp4_quantise` does.

    Written in plain arithmetic, so that a compiler can fuse it.
    """
    groups = weight.unflatten(-1, (-1, _GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    # The bits of a float hold floor(log2) + 127.
    exponent = ((largest.view(torch.int32) >> 23) - 129).clamp(-126, 127)
    scale = torch.exp2(exponent.float())
    magnitude = (groups / scale).abs()
    # The grid is 0, 1/2, … 2, then 3, 4, then 6: its step doubles at 2 and at 4. round() takes ties to the even code.
    step = torch.where(magnitude < 2.0, 0.5, torch.where(magnitude < 4.0, 1.0, 2.0))
    value = (torch.round(magnitude / step) * step).clamp(max=6.0)
    return (value * scale * groups.sign()).flatten(-2)


def straight_through(weight: Tensor) -> Tensor:
    """Forward :func:`rounded`, backward the identity."""
    return weight + (rounded(weight) - weight).detach()
