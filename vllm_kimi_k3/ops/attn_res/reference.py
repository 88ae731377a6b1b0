"""AttnRes in plain torch."""

import torch


def attn_res_reference(
    prefix: torch.Tensor, blocks: torch.Tensor, norm_weight: torch.Tensor, proj_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Softmax-weighted sum of the block snapshots and the running stream, in fp32.

    Each candidate V_i is scored by its RMS-normalised self against ``norm_weight * proj_weight``; the candidates
    themselves are not normalised. With no snapshot the result is the stream.

    Args:
        prefix: [T, H], the running stream.
        blocks: [T, n, H], the snapshots taken so far; n may be 0.
        norm_weight: [H].
        proj_weight: [1, H].
        eps: of the RMS norm.

    Returns:
        [T, H] in the stream's dtype.
    """
    if blocks.shape[1] == 0:
        return prefix
    values = torch.cat([blocks, prefix.unsqueeze(1)], dim=1).float()
    scale = torch.rsqrt(values.square().mean(-1) + eps)
    direction = norm_weight.float() * proj_weight.float().squeeze(0)
    weights = torch.softmax((values @ direction) * scale, dim=-1)
    return torch.einsum("tn,tnh->th", weights, values).to(prefix.dtype)
