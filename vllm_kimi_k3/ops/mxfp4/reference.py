"""MXFP4 bytes to values, in plain torch."""

from functools import cache

import torch

GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _byte_values(device: torch.device) -> torch.Tensor:
    """[256, 2] fp32: the two values of every byte, low nibble first."""
    code = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack([code[byte & 15], code[byte >> 4]], dim=-1)


def dequantise(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values of packed MXFP4.

    Args:
        packed: uint8 [..., N/2]; the low nibble is the even column.
        scale: uint8 [..., N/32]; a group is multiplied by 2^(byte - 127).
        dtype: of the result; bf16 and wider hold every value of the published range exactly.

    Returns:
        [..., N].
    """
    values = _byte_values(packed.device)[packed.int()].flatten(-2)
    factors = torch.exp2(scale.float() - 127.0)
    grouped = values.unflatten(-1, (-1, GROUP)) * factors.unsqueeze(-1)
    return grouped.flatten(-2).to(dtype)
