"""The rotation of queries and keys in plain torch."""

import torch


def rotary_reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn neighbouring pairs of the queries and keys by their patch's angles, in fp32 and in place.

    Args:
        qkv: [L, 3, N, K], queries, keys and values; the values stay as they are.
        cos, sin: fp32 [L, K / 2], of the angles.
    """
    first, second = qkv[:, :2].float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, None], sin[:, None, None]
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1)
    qkv[:, :2] = turned.flatten(-2)
