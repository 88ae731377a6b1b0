"""SiTU in plain torch."""

import torch


def situ_reference(gate_up: torch.Tensor, beta: float, linear_beta: float | None) -> torch.Tensor:
    """``beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)`` in fp32.

    Args:
        gate_up: [..., 2I], gate before up.
        beta: bound of the gate.
        linear_beta: bound of the up path; None leaves it as it is.

    Returns:
        [..., I] in the input's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(gate_up.dtype)
