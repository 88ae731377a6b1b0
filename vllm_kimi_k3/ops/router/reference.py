"""The router in plain torch."""

import torch


def router_reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores in fp32; the correction bias decides who is chosen, not with what weight.

    Args:
        hidden: [T, H].
        weight: [E, H].
        bias: [E] fp32, the score correction.
        top_k: experts a token.
        scale: factor on the renormalised weights.

    Returns:
        ids [T, top_k] int64 (int32 from kernels) and weights [T, top_k] fp32, which sum to ``scale`` over a token.
    """
    return select_reference(hidden.float() @ weight.float().t(), bias, top_k, scale)


def select_reference(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of :func:`router_reference` after the product.

    Args:
        logits: [T, E] fp32.
        bias, top_k, scale: as there.

    Returns:
        as there.
    """
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + bias, top_k, dim=-1).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
