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


def attn_res_norm_reference(
    stream: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    seen: int,
    snapshot: int | None,
    norm_weight: torch.Tensor,
    proj_weight: torch.Tensor,
    eps: float,
    out_weight: torch.Tensor | None,
    out_eps: float,
) -> torch.Tensor:
    """One AttnRes site whole: add what is pending to the stream, keep a snapshot of it, mix, and normalise.

    Args:
        stream: [T, H]; ``delta`` is added to it in place, rounded to its dtype.
        delta: [T, H], the last sublayer's output, or None.
        blocks: [T, N, H], the snapshots; the mix reads the first ``seen``.
        seen: snapshots that exist before this site.
        snapshot: where in ``blocks`` the stream is copied, at least ``seen``; None copies nothing.
        norm_weight, proj_weight, eps: of the mix, see :func:`attn_res_reference`.
        out_weight: [H], weight of the RMS norm after the mix; None leaves the mix as it is.
        out_eps: of that norm.

    Returns:
        [T, H] in the stream's dtype; the normalised value is rounded before it is multiplied by the weight.
    """
    if delta is not None:
        stream.add_(delta)
    mixed = attn_res_reference(stream, blocks[:, :seen], norm_weight, proj_weight, eps)
    if snapshot is not None:
        blocks[:, snapshot] = stream
    if out_weight is None:
        return mixed
    wide = mixed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + out_eps)
    return normed.to(mixed.dtype) * out_weight
