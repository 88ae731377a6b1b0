"""The layers of the training twin as functions of flat tokens.

N tokens stand in one axis, sequence after sequence, so a compiled function serves every batch of N tokens, however long
its sequences are. Only the scan of KDA and the attention of MLA look at sequences. H is the hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.nano.chunked import CHUNK, Chunks, finish, prepare
from vllm_kimi_k3.nano.quantised import straight_through
from vllm_kimi_k3.reference import gated_rms_norm, log_decay, normalise_qk, rms_norm, situ

EPS = 1e-5
_MLA_EPS = 1e-6
_BETA, _LINEAR_BETA = 4.0, 25.0
_LOWER_BOUND = -5.0


def mix(prefix: Tensor, blocks: list[Tensor], norm: Tensor, query: Tensor) -> Tensor:
    """AttnRes mixer over [N, H]; see :func:`vllm_kimi_k3.reference.attn_res`."""
    weight = norm.float() * query.float().flatten()
    values = [value.float() for value in (*blocks, prefix)]
    scores = [
        (value * weight).sum(-1, keepdim=True) * torch.rsqrt(value.square().mean(-1, keepdim=True) + EPS)
        for value in values
    ]
    shares = torch.cat(scores, dim=-1).softmax(-1).split(1, dim=-1)
    out = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        out = out + value * share
    return out.to(prefix.dtype)


def kda_before(
    x: Tensor,
    position: Tensor,
    norm: Tensor,
    joined: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    f_b: Tensor,
    heads: int,
) -> tuple[Chunks, Tensor]:
    """A KDA layer up to its scan.

    Args:
        x: mixed input [N, H]; N a multiple of CHUNK and sequences too.
        position: int64 [N], of a token in its sequence.
        joined: rows of the q, k, v, g, f_a and b projections.
        taps: [3 * channels, 1, kernel], of q, k and v.

    Returns:
        the chunks, C = N / CHUNK * heads of them with the head changing fastest, and the gate [N, channels].
    """
    dim = f_b.shape[0] // heads
    channels = heads * dim
    projected = F.linear(rms_norm(x, norm, EPS), joined)
    qkv, gate, low, beta = projected.split([3 * channels, channels, f_b.shape[1], heads], dim=-1)
    q, k, v = short_conv(qkv, position, taps).unflatten(-1, (3, heads, dim)).unbind(1)
    q, k = normalise_qk(q, k)
    decay = log_decay(F.linear(low, f_b).unflatten(-1, (heads, dim)), a_log, dt_bias, _LOWER_BOUND)

    def split(y: Tensor) -> Tensor:
        return y.float().unflatten(0, (-1, CHUNK)).transpose(1, 2).flatten(0, 1)

    rows = [split(y) for y in (q, k, v, decay, beta.float().sigmoid().unsqueeze(-1))]
    return prepare(*rows), gate


def kda_after(chunks: Chunks, states: Tensor, gate: Tensor, o_norm: Tensor, o_proj: Tensor, heads: int) -> Tensor:
    """A KDA layer from the states before its chunks [C, K, V]: [N, H]."""
    out = finish(chunks, states).unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1).to(gate.dtype)
    normed = gated_rms_norm(out, gate.unflatten(-1, (heads, -1)), o_norm, EPS)
    return F.linear(normed.flatten(-2), o_proj)


def short_conv(x: Tensor, position: Tensor, taps: Tensor) -> Tensor:
    """Depthwise causal convolution of [N, C] with [C, 1, kernel], then SiLU; a sequence begins at position 0."""
    size = taps.shape[-1]
    weight = taps.float().squeeze(1)
    full = x.float()
    mixed = full * weight[:, size - 1]
    for back in range(1, size):
        shifted = F.pad(full, (0, 0, back, 0))[: x.shape[0]]
        mixed = mixed + shifted * (position >= back).unsqueeze(-1) * weight[:, size - 1 - back]
    return F.silu(mixed).to(x.dtype)


def mla_before(
    x: Tensor,
    norm: Tensor,
    joined: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    kv_b: Tensor,
    nope: int,
    rope: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An MLA layer up to its attention.

    Args:
        x: mixed input [N, H].
        joined: rows of the q_a, kv_a and g projections.
        nope: width of a head's own keys.
        rope: width of the key that the heads share.

    Returns:
        q and k [N, heads, nope + rope], v [N, heads, V], and the gate [N, heads * V].
    """
    ranks = [q_norm.shape[0], kv_norm.shape[0], rope]
    low_q, low_kv, shared, gate = F.linear(rms_norm(x, norm, EPS), joined).split(
        [*ranks, joined.shape[0] - sum(ranks)], dim=-1
    )
    q = F.linear(rms_norm(low_q, q_norm, _MLA_EPS), q_b).unflatten(-1, (-1, nope + rope))
    kv = F.linear(rms_norm(low_kv, kv_norm, _MLA_EPS), kv_b).unflatten(-1, (q.shape[1], -1))
    k = torch.cat([kv[..., :nope], shared.unsqueeze(1).expand(-1, q.shape[1], -1)], dim=-1)
    return q, k, kv[..., nope:].contiguous(), gate


def mla_after(attended: Tensor, gate: Tensor, o_proj: Tensor) -> Tensor:
    """An MLA layer from what its heads attended to [N, heads * V]: [N, H]."""
    return F.linear(attended * gate.sigmoid(), o_proj)


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The dense MLP from its mixed input [N, H]."""
    return _situ_mlp(rms_norm(x, norm, EPS), gate, up, down)


def _situ_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(situ(F.linear(x, gate), F.linear(x, up), _BETA, _LINEAR_BETA), down)


def moe(
    x: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    top_k: int,
    latent: tuple[Tensor, Tensor, Tensor],
    experts: tuple[Tensor, Tensor, Tensor],
    shared: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """LatentMoE from its mixed input [N, H].

    Args:
        router: [experts, H]; ``bias`` fp32 [experts].
        latent: the latent's down-projection, norm and up-projection.
        experts: w1, w3 and w2, fp32 [experts, out, in]; rounded to MXFP4 here.
        shared: gate, up and down projection of the shared experts.

    Returns:
        [N, H], and the router's scores fp32 [N, experts].
    """
    x = rms_norm(x, norm, EPS)
    scores = F.linear(x.float(), router.float()).sigmoid()
    ids = (scores + bias).topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter(-1, ids, 1.0) * scores
    shares = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    down, latent_norm, up = latent
    w1, w3, w2 = [straight_through(w).to(x.dtype) for w in experts]
    z = F.linear(x, down)
    inner = situ(F.linear(z, w1.flatten(0, 1)), F.linear(z, w3.flatten(0, 1)), _BETA, _LINEAR_BETA)
    weighted = inner.unflatten(-1, (w1.shape[0], -1)) * shares.unsqueeze(-1).to(x.dtype)
    summed = F.linear(weighted.flatten(-2), w2.transpose(0, 1).flatten(1))
    routed = F.linear(rms_norm(summed, latent_norm, EPS), up)
    return routed + _situ_mlp(x, *shared), scores


def token_losses(hidden: Tensor, norm: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy fp32 [N] of the next tokens int64 [N] from [N, H]."""
    logits = F.linear(rms_norm(hidden, norm, EPS), head).float()
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
