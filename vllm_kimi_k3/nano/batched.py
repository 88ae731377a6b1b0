"""The text model over batches of sequences, for training: a twin of ``reference.py`` that is tested equal to it.

Parameters are fp32 and are cast where they are used, so what is trained is what the bf16 checkpoint computes. Experts
are stacked, rounded to MXFP4 on the way, and all of them run on every token: for eight small ones that costs less than
sorting tokens. Shapes: B sequences, T tokens, H hidden size, N heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_kimi_k3.nano.chunked import kda_chunked
from vllm_kimi_k3.nano.layout import text_tensors
from vllm_kimi_k3.nano.quantised import straight_through
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.reference import gated_rms_norm, log_decay, normalise_qk, rms_norm, situ

_EPS = 1e-5
_MLA_EPS = 1e-6
_BETA, _LINEAR_BETA = 4.0, 25.0
_LOWER_BOUND = -5.0


class BatchedK3(nn.Module):
    """A miniature K3 over [B, T] token ids, every sequence from an empty state.

    Args:
        shape: of the model.
        weights: fp32 by published name, experts unpacked; copied into parameters.
        dtype: of the activations.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.names = _stacked_names(shape)
        for own, published in self.names.items():
            found = [weights[name].float() for name in published]
            value = torch.stack(found) if own.endswith(("w1", "w2", "w3")) else found[0].clone()
            trained = not own.endswith("e_score_correction_bias")
            self.register_parameter(_flat(own), nn.Parameter(value, requires_grad=trained))

    def published(self) -> dict[str, Tensor]:
        """The parameters by published name, experts unstacked."""
        found: dict[str, Tensor] = {}
        for own, published in self.names.items():
            value = self.get_parameter(_flat(own)).detach()
            found |= zip(published, value if len(published) > 1 else [value], strict=True)
        return found

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, list[Tensor], Tensor]:
        """Run all layers.

        Args:
            ids: int64 [B, T].
            taps: 0-based layers whose outgoing prefix stream is wanted.

        Returns:
            hidden [B, T, H] after the final mix and before the final norm; the taps, [B, T, H] each; and the router
            scores of the MoE layers, fp32 [layers, B, T, experts].
        """
        s = self.shape
        root = "language_model.model"
        prefix, blocks, kept, scores = F.embedding(ids, self._w(f"{root}.embed_tokens")), list[Tensor](), {}, []
        for i in range(s.num_hidden_layers):
            layer = f"{root}.layers.{i}"
            mixed = prefix
            if blocks:
                mixed = mix(prefix, blocks, *self._mixer(f"{layer}.self_attention_res"))
            starts = i % s.attn_res_block_size == 0
            if starts:
                blocks.append(prefix)
            attention = self._mla if i in s.mla_layers else self._kda
            attended = attention(f"{layer}.self_attn", mixed, self._w(f"{layer}.input_layernorm"))
            prefix = attended if starts else prefix + attended
            mixed = mix(prefix, blocks, *self._mixer(f"{layer}.mlp_res"))
            norm = self._w(f"{layer}.post_attention_layernorm")
            if i == 0:
                out = mlp(mixed, norm, *self._mlp(f"{layer}.mlp"))
            else:
                out, score = self._moe(f"{layer}.block_sparse_moe", mixed, norm)
                scores.append(score)
            prefix = prefix + out
            kept[i] = prefix
        hidden = mix(prefix, blocks, *self._mixer(f"{root}.output_attn_res"))
        return hidden, [kept[i] for i in taps], torch.stack(scores)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., H] to [..., vocabulary]."""
        norm, head = self._w("language_model.model.norm"), self._w("language_model.lm_head")
        return F.linear(rms_norm(hidden, norm, _EPS), head)

    def _w(self, name: str) -> Tensor:
        return self.get_parameter(_flat(f"{name}.weight")).to(self.dtype)

    def _fp32(self, name: str) -> Tensor:
        return self.get_parameter(_flat(name))

    def _mixer(self, name: str) -> tuple[Tensor, Tensor]:
        return self._w(f"{name}_norm"), self._w(f"{name}_proj")

    def _mlp(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self._w(f"{name}.gate_proj"), self._w(f"{name}.up_proj"), self._w(f"{name}.down_proj")

    def _kda(self, name: str, x: Tensor, norm: Tensor) -> Tensor:
        parts = [self._w(f"{name}.{p}_proj") for p in ("q", "k", "v", "g", "f_a", "b")]
        taps = torch.cat([self._w(f"{name}.{p}_conv1d") for p in ("q", "k", "v")])
        decay = self._fp32(f"{name}.A_log"), self._fp32(f"{name}.dt_bias")
        rest = self._w(f"{name}.f_b_proj"), self._w(f"{name}.o_norm"), self._w(f"{name}.o_proj")
        return kda(x, norm, torch.cat(parts), taps, *decay, *rest)

    def _mla(self, name: str, x: Tensor, norm: Tensor) -> Tensor:
        joined = torch.cat([self._w(f"{name}.{p}") for p in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")])
        norms = self._w(f"{name}.q_a_layernorm"), self._w(f"{name}.kv_a_layernorm")
        ups = self._w(f"{name}.q_b_proj"), self._w(f"{name}.kv_b_proj"), self._w(f"{name}.o_proj")
        s = self.shape
        return mla(x, norm, joined, *norms, *ups, s.qk_nope_head_dim, s.qk_rope_head_dim, s.v_head_dim)

    def _moe(self, name: str, x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        experts = [straight_through(self._fp32(f"{name}.experts.{w}")).to(self.dtype) for w in ("w1", "w3", "w2")]
        router = self._w(f"{name}.gate"), self._fp32(f"{name}.gate.e_score_correction_bias")
        latent = [self._w(f"{name}.routed_expert_{p}") for p in ("down_proj", "norm", "up_proj")]
        shared = self._mlp(f"{name}.shared_experts")
        return moe(x, norm, *router, self.shape.num_experts_per_token, *latent, *experts, *shared)


def _flat(name: str) -> str:
    """torch allows no dots in the name of a parameter."""
    return name.replace(".", "/")


def _stacked_names(shape: Shape) -> dict[str, list[str]]:
    """Name of a parameter to the published names of its rows: the experts of a layer are stacked."""
    names: dict[str, list[str]] = {}
    for name, spec in text_tensors(shape).items():
        if spec.kind == "expert":
            layer, _, which = name.removesuffix(".weight").rpartition(".experts.")
            own = f"{layer}.experts.{which.partition('.')[2]}"
        else:
            own = name
        names.setdefault(own, []).append(name)
    return names


def mix(prefix: Tensor, blocks: list[Tensor], norm: Tensor, query: Tensor) -> Tensor:
    """AttnRes mixer over [B, T, H]; see :func:`vllm_kimi_k3.reference.attn_res`."""
    weight = norm.float() * query.float().flatten()
    values = [value.float() for value in (*blocks, prefix)]
    scores = [
        (value * weight).sum(-1, keepdim=True) * torch.rsqrt(value.square().mean(-1, keepdim=True) + _EPS)
        for value in values
    ]
    shares = torch.cat(scores, dim=-1).softmax(-1)
    out = sum(value * share for value, share in zip(values, shares.split(1, dim=-1), strict=True))
    assert isinstance(out, Tensor)
    return out.to(prefix.dtype)


def kda(
    x: Tensor,
    norm: Tensor,
    joined: Tensor,
    taps: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    f_b: Tensor,
    o_norm: Tensor,
    o_proj: Tensor,
) -> Tensor:
    """A KDA layer from its mixed input [B, T, H]; ``joined`` is the rows of q, k, v, g, f_a and b projections."""
    dim = o_norm.shape[0]
    channels = o_proj.shape[1]
    heads = channels // dim
    projected = F.linear(rms_norm(x, norm, _EPS), joined)
    qkv, gate, low, beta = projected.split([3 * channels, channels, f_b.shape[1], heads], dim=-1)
    q, k, v = short_conv(qkv, taps).unflatten(-1, (3, heads, dim)).unbind(-3)
    q, k = normalise_qk(q, k)
    decay = log_decay(F.linear(low, f_b).unflatten(-1, (heads, dim)), a_log, dt_bias, _LOWER_BOUND)

    def rows(y: Tensor) -> Tensor:
        return y.float().transpose(1, 2).flatten(0, 1)

    out = kda_chunked(rows(q), rows(k), rows(v), rows(decay), rows(beta.float().sigmoid()), 32)
    out = out.unflatten(0, (-1, heads)).transpose(1, 2).to(x.dtype)
    normed = gated_rms_norm(out, gate.unflatten(-1, (heads, dim)), o_norm, _EPS)
    return F.linear(normed.flatten(-2), o_proj)


def short_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Depthwise causal convolution of [B, T, C] with [C, 1, kernel] from zeros, then SiLU."""
    size = taps.shape[-1]
    padded = F.pad(x, (0, 0, size - 1, 0)).float()
    weight = taps.float().squeeze(1)
    length = x.shape[1]
    mixed = sum(padded[:, j : j + length] * weight[:, j] for j in range(size))
    assert isinstance(mixed, Tensor)
    return F.silu(mixed).to(x.dtype)


def mla(
    x: Tensor,
    norm: Tensor,
    joined: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    kv_b: Tensor,
    o_proj: Tensor,
    nope: int,
    rope: int,
    value: int,
) -> Tensor:
    """An MLA layer from its mixed input [B, T, H]; ``joined`` is the rows of q_a, kv_a and g projections."""
    ranks = [q_norm.shape[0], kv_norm.shape[0], rope, o_proj.shape[1]]
    low_q, low_kv, shared, gate = F.linear(rms_norm(x, norm, _EPS), joined).split(ranks, dim=-1)
    q = F.linear(rms_norm(low_q, q_norm, _MLA_EPS), q_b).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    kv = F.linear(rms_norm(low_kv, kv_norm, _MLA_EPS), kv_b).unflatten(-1, (-1, nope + value)).transpose(1, 2)
    k, v = kv.split([nope, value], dim=-1)
    k = torch.cat([k, shared.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], dim=-1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).flatten(-2) * gate.sigmoid(), o_proj)


def mlp(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The dense MLP from its mixed input [B, T, H]."""
    return _situ_mlp(rms_norm(x, norm, _EPS), gate, up, down)


def _situ_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(situ(F.linear(x, gate), F.linear(x, up), _BETA, _LINEAR_BETA), down)


def moe(
    x: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    top_k: int,
    down: Tensor,
    latent_norm: Tensor,
    up: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_gate: Tensor,
    shared_up: Tensor,
    shared_down: Tensor,
) -> tuple[Tensor, Tensor]:
    """LatentMoE from its mixed input [B, T, H]; experts are [experts, out, in]. Also returns the router's scores."""
    x = rms_norm(x, norm, _EPS)
    scores = F.linear(x.float(), router.float()).sigmoid()
    ids = (scores + bias).topk(top_k, dim=-1).indices
    chosen = torch.zeros_like(scores).scatter(-1, ids, 1.0) * scores
    shares = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    latent = F.linear(x, down)
    inner = situ(F.linear(latent, w1.flatten(0, 1)), F.linear(latent, w3.flatten(0, 1)), _BETA, _LINEAR_BETA)
    weighted = inner.unflatten(-1, (w1.shape[0], -1)) * shares.unsqueeze(-1).to(x.dtype)
    summed = F.linear(weighted.flatten(-2), w2.transpose(0, 1).flatten(1))
    routed = F.linear(rms_norm(summed, latent_norm, _EPS), up)
    return routed + _situ_mlp(x, shared_gate, shared_up, shared_down), scores
