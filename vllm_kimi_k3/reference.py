"""The Kimi K3 text model in plain torch: the oracle of every test.

One sequence at a time, no batching, no kernels, no vLLM. Works in bf16, fp32 and fp64, and autograd runs through all
of it. Shapes: T new tokens, H hidden size, N heads, K and V key and value width of a head, L the latent of the experts.
Statistics, softmax, decay, recurrent state and router are kept *wide*: fp64 for an fp64 model, fp32 for any other.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The released model gives the norms of the two MLA latents no eps of their own, so they get its default and not the
# config's 1e-5.
_MLA_NORM_EPS = 1e-6
_QK_NORM_EPS = 1e-6


@dataclass(frozen=True)
class K3Config:
    """The fields of ``text_config`` that the forward pass reads; names as published, KDA's own with ``kda_``."""

    num_hidden_layers: int
    rms_norm_eps: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_experts_per_token: int
    routed_scaling_factor: float
    first_k_dense_replace: int
    attn_res_block_size: int
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    kda_layers: frozenset[int]
    kda_heads: int
    kda_head_dim: int
    kda_conv_size: int
    kda_gate_lower_bound: float | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "K3Config":
        """Read a published ``config.json``: a whole K3 (with ``text_config``) or a text config alone.

        Raises:
            ValueError: a field is missing; the message names it.
        """
        text = config.get("text_config", config)
        try:
            linear = text["linear_attn_config"]
            # The published layer numbers count from 1.
            kda: dict[str, Any] = {
                "kda_layers": frozenset(number - 1 for number in linear["kda_layers"]),
                "kda_heads": linear["num_heads"],
                "kda_head_dim": linear["head_dim"],
                "kda_conv_size": linear["short_conv_kernel_size"],
                "kda_gate_lower_bound": linear.get("gate_lower_bound"),
            }
            plain = {f.name: text[f.name] for f in fields(cls) if f.name not in kda}
        except KeyError as error:
            raise ValueError(f"config.json: the text config lacks {error.args[0]!r}") from error
        return cls(**plain, **kda)


@dataclass
class KdaState:
    """What a KDA layer carries: of q, k and v the last inputs before the convolution, each [N*K, kernel - 1], newest
    last; and the recurrent state [N, V, K], wide.
    """

    conv: dict[str, Tensor]
    recurrent: Tensor


@dataclass
class MlaState:
    """What an MLA layer carries: one row a token, ``[normed latent | shared key]``: [tokens, kv_lora + rope width]."""

    latent: Tensor


@dataclass
class State:
    """The cache of one sequence, by layer, and its length in tokens. Tensors are replaced and never written to."""

    layers: list[KdaState | MlaState]
    length: int = 0


class Stream(NamedTuple):
    """What leaves the last layer: ``hidden`` [T, H] (final mix, before the final norm) and the asked ``aux``."""

    hidden: Tensor
    aux: list[Tensor]


def wide(x: Tensor) -> Tensor:
    """``x`` in fp64 if it is fp64, else in fp32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis; the normalised value is rounded to ``x``'s dtype before the weight."""
    full = wide(x)
    return weight * (full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """KDA's output norm, ``RMSNorm(x) * weight * sigmoid(gate)``, rounded once at the end."""
    full = wide(x)
    normed = full * torch.rsqrt(full.square().mean(-1, keepdim=True) + eps)
    return (normed * wide(weight) * wide(gate).sigmoid()).to(x.dtype)


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU: ``beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta)``; None leaves ``up`` as it is."""
    g, u = wide(gate), wide(up)
    if linear_beta is not None:
        u = linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * g.sigmoid() * u).to(gate.dtype)


def attn_res(prefix: Tensor, blocks: list[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """The AttnRes mixer: softmax attention of each token over its own block snapshots and its running prefix.

    Args:
        prefix: [T, H]; ``blocks`` holds the snapshots, oldest first, each [T, H].
        norm: [H], weight of the norm of the keys.
        proj: [1, H], the query.

    Returns:
        [T, H]: the mix of the values as they are; without snapshots, ``prefix`` itself.
    """
    values = wide(torch.stack([*blocks, prefix], dim=1))
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    scores = (keys * wide(norm) * wide(proj).flatten()).sum(-1)
    return (scores.softmax(-1).unsqueeze(-1) * values).sum(1).to(prefix.dtype)


def short_conv(x: Tensor, weight: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, then SiLU.

    Args:
        x: [T, C]; ``weight`` [C, kernel] or [C, 1, kernel].
        last: [C, kernel - 1], the inputs before ``x``, newest last; the next one is returned beside the result [T, C].
    """
    taps = wide(weight.reshape(weight.shape[0], -1))
    inputs = torch.cat([last, x.T], dim=1)
    windows = [wide(inputs[:, j : j + len(x)]) for j in range(taps.shape[1])]
    mixed = torch.stack(windows, dim=-1).mul(taps.unsqueeze(1)).sum(-1)
    return F.silu(mixed).T.to(x.dtype), inputs[:, len(x) :]


def log_decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """KDA's log-decay a step, at most 0.

    Args:
        f: [T, N, K], output of the decay projection.
        a_log: [N] or longer; entries past N are padding in the published file.
        dt_bias: [N*K].
        lower_bound: the least value, or None for the unbounded softplus form.
    """
    heads = f.shape[-2]
    rate = wide(a_log).flatten()[:heads, None].exp()
    raw = wide(f) + wide(dt_bias).view(heads, -1)
    return -rate * F.softplus(raw) if lower_bound is None else lower_bound * torch.sigmoid(rate * raw)


def normalise_qk(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """L2-normalise queries and keys [T, N, K] and scale the queries by K^-0.5; the result is wide."""
    qn, kn = wide(q), wide(k)
    qn = qn * torch.rsqrt(qn.square().sum(-1, keepdim=True) + _QK_NORM_EPS) * q.shape[-1] ** -0.5
    return qn, kn * torch.rsqrt(kn.square().sum(-1, keepdim=True) + _QK_NORM_EPS)


def kda_recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule with a decay per key channel, token by token.

    ``S <- S diag(exp decay); u = beta (v - S k); S <- S + u k^T; o = S q``.

    Args:
        q, k: normalised, [T, N, K]; ``v`` [T, N, V]; ``decay`` log, [T, N, K]; ``beta`` [T, N]; all wide.
        initial: [N, V, K].

    Returns:
        o [T, N, V] and the final state [N, V, K].
    """
    state, out = initial, []
    for t in range(q.shape[0]):
        state = state * decay[t].exp().unsqueeze(-2)
        u = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("nvk,nk->nv", state, k[t]))
        state = state + u.unsqueeze(-1) * k[t].unsqueeze(-2)
        out.append(torch.einsum("nvk,nk->nv", state, q[t]))
    return torch.stack(out) if out else v, state


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, initial: Tensor, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """``kda_recurrent`` with one step per ``chunk`` tokens; arguments and results are the same.

    With G the running sum of the log-decay inside a chunk, the u of a chunk solve
    ``u_t + beta_t sum_{i<t} (k_t . e^{G_t - G_i} k_i) u_i = beta_t (v_t - S_0 (e^{G_t} k_t))``.
    Every exponent is that of a later minus an earlier G, so it is never above 0 and nothing overflows, however strong
    the decay. Memory grows with T * chunk * N * K.
    """
    length, width = q.shape[0], q.shape[-1]

    def split(x: Tensor) -> Tensor:
        # Padding has k = 0, beta = 0 and decay 0, so it does not touch the state. To [chunks, N, chunk, ...].
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -length % chunk)).unflatten(0, (-1, chunk)).transpose(1, 2)

    qc, kc, vc, bc = split(q), split(k), split(v), split(beta).unsqueeze(-1)
    total = split(decay).cumsum(2)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    # Masked before exp: an earlier minus a later sum can overflow, and 0 * inf would poison the gradient.
    gap = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(~later[..., None], -torch.inf)
    kept = gap.exp() * kc.unsqueeze(2)
    from_q = torch.einsum("cntk,cntik->cnti", qc, kept)
    from_k = torch.einsum("cntk,cntik->cnti", kc, kept).tril(-1)
    # The solver takes the diagonal as 1.
    right = torch.cat([bc * vc, bc * kc * total.exp()], dim=-1)
    solved = torch.linalg.solve_triangular(bc * from_k, right, upper=False, unitriangular=True)
    u_free, u_state = solved.split([v.shape[-1], width], dim=-1)
    q_state, k_end = qc * total.exp(), kc * (total[:, :, -1:] - total).exp()
    state, out = initial, []
    for c in range(qc.shape[0]):
        u = u_free[c] - u_state[c] @ state.mT
        out.append(q_state[c] @ state.mT + from_q[c] @ u)
        state = state * total[c, :, -1:].exp() + u.mT @ k_end[c]
    joined = torch.stack(out).transpose(1, 2).flatten(0, 1)[:length] if out else v
    return joined, state


def route(x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Choose experts by sigmoid score plus bias; weigh them by the score alone, renormalised.

    Args:
        x: [T, H]; ``weight`` [experts, H]; ``bias`` [experts].

    Returns:
        ids [T, top_k] int64 and wide weights [T, top_k], in descending order of score plus bias.
    """
    scores = F.linear(wide(x), wide(weight).to(wide(x).dtype)).sigmoid()
    ids = (scores + bias).topk(top_k).indices
    chosen = scores.gather(-1, ids)
    return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling


def mxfp4_quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to MXFP4 as compressed-tensors does: ties to the even code, scale ``2^(floor(log2 max) - 2)`` a group.

    Args:
        weight: [..., columns], columns a multiple of 32.

    Returns:
        uint8 [..., columns/2], the low nibble the even column, and uint8 [..., columns/32], 127 + exponent.

    Raises:
        ValueError: columns do not divide into groups, or a value is not finite.
    """
    if weight.shape[-1] % MXFP4_GROUP:
        raise ValueError(f"MXFP4: {weight.shape[-1]} columns are not a multiple of {MXFP4_GROUP}")
    if not torch.isfinite(weight).all():
        raise ValueError("MXFP4: the weight has values that are not finite")
    groups = wide(weight).unflatten(-1, (-1, MXFP4_GROUP))
    # frexp gives a mantissa in [0.5, 1), so its exponent is floor(log2) + 1.
    exponent = (torch.frexp(groups.abs().amax(-1)).exponent - 3).clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent.unsqueeze(-1)).flatten(-2)
    magnitude = scaled.abs()
    to_lower = torch.tensor([0.25, 1.25, 2.5, 5.0], dtype=magnitude.dtype, device=weight.device)
    to_upper = torch.tensor([0.75, 1.75, 3.5], dtype=magnitude.dtype, device=weight.device)
    code = torch.bucketize(magnitude, to_lower) + torch.bucketize(magnitude, to_upper, right=True)
    code = (code + 8 * torch.signbit(scaled)).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def mxfp4_dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Values of packed MXFP4, [..., columns], from what ``mxfp4_quantise`` returns; exact in bf16 and wider."""
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float64, device=packed.device)
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    groups = values[codes.long()].unflatten(-1, (-1, MXFP4_GROUP))
    return torch.ldexp(groups, scale.int().unsqueeze(-1) - 127).flatten(-2).to(dtype)


class KimiK3:
    """The text model over a dict of published tensor names.

    Args:
        config: of the model.
        weights: published name (with or without ``language_model.``) to tensor; an expert is ``.weight_packed`` and
            ``.weight_scale``, or ``.weight``. They are cast where they are used, so fp32 parameters train a bf16 model.
        dtype: of the activations.
        chunk: tokens a step of KDA; None runs the plain recurrence.
    """

    def __init__(
        self, config: K3Config, weights: Mapping[str, Tensor], dtype: torch.dtype, *, chunk: int | None = None
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.chunk = chunk
        self.weights = {name.removeprefix("language_model."): tensor for name, tensor in weights.items()}

    def forward(self, input_ids: Tensor, state: State | None = None) -> Tensor:
        """Logits [T, vocabulary] of ``input_ids`` [T] that follow ``state``; advances ``state``."""
        return self.logits(self.run(self.embed(input_ids), state).hidden)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of token ids [T]."""
        return self.weight("model.embed_tokens.weight")[input_ids]

    def run(
        self,
        embeddings: Tensor,
        state: State | None = None,
        *,
        aux_layers: Iterable[int] = (),
        trace: dict[str, Tensor] | None = None,
    ) -> Stream:
        """Run all layers on embeddings [T, H].

        Args:
            state: what came before; advanced. None starts a sequence and throws its cache away.
            aux_layers: 0-based layers; the prefix stream that leaves each is returned in this order.
            trace: filled with ``layer{i}.`` ``attn_mixer_out``, ``attn_out``, ``mlp_mixer_out``, ``mlp_out`` and
                ``prefix_out``, each [T, H].
        """
        state = state or self.new_state()
        trace = {} if trace is None else trace
        prefix, blocks, streams = embeddings.to(self.dtype), list[Tensor](), {}
        for i in range(self.config.num_hidden_layers):
            prefix = self._layer(i, prefix, blocks, state.layers[i], trace)
            streams[i] = prefix
        state.length += embeddings.shape[0]
        return Stream(self._mix("model.output_attn_res", prefix, blocks), [streams[i] for i in aux_layers])

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [T, H] to [T, vocabulary]."""
        return F.linear(self._norm("model.norm", hidden), self.weight("lm_head.weight"))

    def new_state(self) -> State:
        """The state of an empty sequence."""
        c = self.config
        zeros = self.weights["model.embed_tokens.weight"].new_zeros
        layers: list[KdaState | MlaState] = []
        for i in range(c.num_hidden_layers):
            if i in c.kda_layers:
                conv = zeros(c.kda_heads * c.kda_head_dim, c.kda_conv_size - 1, dtype=self.dtype)
                wide_dtype = torch.promote_types(self.dtype, torch.float32)
                recurrent = zeros(c.kda_heads, c.kda_head_dim, c.kda_head_dim, dtype=wide_dtype)
                layers.append(KdaState(dict.fromkeys("qkv", conv), recurrent))
            else:
                layers.append(MlaState(zeros(0, c.kv_lora_rank + c.qk_rope_head_dim, dtype=self.dtype)))
        return State(layers)

    def weight(self, name: str) -> Tensor:
        """A weight in the model's dtype, by published name without ``language_model.``."""
        return self.weights[name].to(self.dtype)

    def _layer(
        self, i: int, prefix: Tensor, blocks: list[Tensor], state: KdaState | MlaState, trace: dict[str, Tensor]
    ) -> Tensor:
        """One layer: takes and returns the prefix stream [T, H]; appends to ``blocks`` where a block starts."""
        name = f"model.layers.{i}"
        mixed = self._mix(f"{name}.self_attention_res", prefix, blocks)
        starts_block = i % self.config.attn_res_block_size == 0
        if starts_block:
            blocks.append(prefix)
        attended = self.attention(i, self._norm(f"{name}.input_layernorm", mixed), state)
        prefix = attended if starts_block else prefix + attended
        mlp_mixed = self._mix(f"{name}.mlp_res", prefix, blocks)
        out = self.feed_forward(i, self._norm(f"{name}.post_attention_layernorm", mlp_mixed))
        prefix = prefix + out
        values = {"attn_mixer_out": mixed, "attn_out": attended, "mlp_mixer_out": mlp_mixed, "mlp_out": out}
        trace |= {f"layer{i}.{key}": value for key, value in [*values.items(), ("prefix_out", prefix)]}
        return prefix

    def attention(self, i: int, x: Tensor, state: KdaState | MlaState) -> Tensor:
        """The KDA or MLA of layer ``i`` on its normed input [T, H]; advances ``state``."""
        name = f"model.layers.{i}.self_attn"
        return self._kda(name, x, state) if isinstance(state, KdaState) else self._mla(name, x, state)

    def feed_forward(self, i: int, x: Tensor) -> Tensor:
        """The dense MLP or LatentMoE of layer ``i`` on its normed input [T, H]."""
        if i < self.config.first_k_dense_replace:
            return self._mlp(f"model.layers.{i}.mlp", x)
        return self._moe(f"model.layers.{i}.block_sparse_moe", x)

    def _kda(self, name: str, x: Tensor, state: KdaState) -> Tensor:
        c = self.config
        heads = (c.kda_heads, c.kda_head_dim)
        post = {}
        for part in "qkv":
            # Published in fp32, as is the output norm's weight below.
            taps = self.weights[f"{name}.{part}_conv1d.weight"]
            projected = self._linear(f"{name}.{part}_proj", x)
            post[part], state.conv[part] = short_conv(projected, taps, state.conv[part])
        q, k = normalise_qk(post["q"].unflatten(-1, heads), post["k"].unflatten(-1, heads))
        f = self._linear(f"{name}.f_b_proj", self._linear(f"{name}.f_a_proj", x)).unflatten(-1, heads)
        decay = log_decay(f, self.weights[f"{name}.A_log"], self.weights[f"{name}.dt_bias"], c.kda_gate_lower_bound)
        beta = wide(self._linear(f"{name}.b_proj", x)).sigmoid()
        args = q, k, wide(post["v"]).unflatten(-1, heads), decay, beta, state.recurrent
        o, state.recurrent = kda_recurrent(*args) if self.chunk is None else kda_chunked(*args, self.chunk)
        gate = self._linear(f"{name}.g_proj", x).unflatten(-1, heads)
        normed = gated_rms_norm(o.to(self.dtype), gate, self.weights[f"{name}.o_norm.weight"], c.rms_norm_eps)
        return self._linear(f"{name}.o_proj", normed.flatten(-2))

    def _mla(self, name: str, x: Tensor, state: MlaState) -> Tensor:
        c = self.config
        nope, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
        query_latent = self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x), _MLA_NORM_EPS)
        q = self._linear(f"{name}.q_b_proj", query_latent).unflatten(-1, (-1, nope + rope))
        latent, shared_key = self._linear(f"{name}.kv_a_proj_with_mqa", x).split([c.kv_lora_rank, rope], dim=-1)
        latent = self._norm(f"{name}.kv_a_layernorm", latent, _MLA_NORM_EPS)
        state.latent = torch.cat([state.latent, torch.cat([latent, shared_key], dim=-1)])
        latent, shared_key = state.latent.split([c.kv_lora_rank, rope], dim=-1)
        kv = self._linear(f"{name}.kv_b_proj", latent).unflatten(-1, (-1, nope + c.v_head_dim))
        k_nope, v = kv.split([nope, c.v_head_dim], dim=-1)
        key = torch.cat([k_nope, shared_key.unsqueeze(1).expand(-1, kv.shape[1], -1)], dim=-1)
        scores = wide(torch.einsum("tnk,snk->nts", q, key)) * (nope + rope) ** -0.5
        queries, rows = scores.shape[-2:]
        seen = torch.ones(queries, rows, dtype=torch.bool, device=x.device).tril(rows - queries)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(self.dtype)
        attended = torch.einsum("nts,snv->tnv", weights, v).flatten(-2)
        return self._linear(f"{name}.o_proj", attended * self._linear(f"{name}.g_proj", x).sigmoid())

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        c = self.config
        gate, up = self._linear(f"{name}.gate_proj", x), self._linear(f"{name}.up_proj", x)
        inner = situ(gate, up, c.activation_situ_beta, c.activation_situ_linear_beta)
        return self._linear(f"{name}.down_proj", inner)

    def _moe(self, name: str, x: Tensor) -> Tensor:
        summed = self.routed_experts(name, x, *self.route(name, x))
        normed = self._norm(f"{name}.routed_expert_norm", summed)
        return self._linear(f"{name}.routed_expert_up_proj", normed) + self._mlp(f"{name}.shared_experts", x)

    def route(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, [T, top_k] each, of the MoE called ``name`` on its input [T, H]."""
        gate, bias = self.weights[f"{name}.gate.weight"], self.weights[f"{name}.gate.e_score_correction_bias"]
        return route(x, gate, bias, self.config.num_experts_per_token, self.config.routed_scaling_factor)

    def routed_experts(self, name: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum [T, L] of the chosen experts on the latent of ``x`` [T, H], before its norm."""
        c = self.config
        latent = self._linear(f"{name}.routed_expert_down_proj", x)
        total = torch.zeros_like(wide(latent))
        for e in ids.unique().tolist():
            expert = f"{name}.experts.{e}"
            token, slot = torch.nonzero(ids == e, as_tuple=True)
            gate, up = (F.linear(latent[token], self._expert(f"{expert}.{w}")) for w in ("w1", "w3"))
            inner = situ(gate, up, c.activation_situ_beta, c.activation_situ_linear_beta)
            out = F.linear(inner, self._expert(f"{expert}.w2"))
            total = total.index_add(0, token, wide(out) * weights[token, slot].unsqueeze(-1))
        return total.to(self.dtype)

    def _expert(self, name: str) -> Tensor:
        if f"{name}.weight" in self.weights:
            return self.weight(f"{name}.weight")
        return mxfp4_dequantise(self.weights[f"{name}.weight_packed"], self.weights[f"{name}.weight_scale"], self.dtype)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"))

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return rms_norm(x, self.weight(f"{name}.weight"), self.config.rms_norm_eps if eps is None else eps)

    def _mix(self, name: str, prefix: Tensor, blocks: list[Tensor]) -> Tensor:
        norm, proj = self.weight(f"{name}_norm.weight"), self.weight(f"{name}_proj.weight")
        return attn_res(prefix, blocks, norm, proj, self.config.rms_norm_eps)


def load_checkpoint(path: Path, dtype: torch.dtype, *, chunk: int | None = None) -> KimiK3:
    """Load the text model of a directory in the published layout: ``config.json`` and a safetensors index with its
    shards, or a single ``model.safetensors``. bf16 tensors are cast to ``dtype``; others stay as stored.
    """
    config = K3Config.from_dict(json.loads((path / "config.json").read_text()))
    index = path / "model.safetensors.index.json"
    shards = ["model.safetensors"]
    if index.exists():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights = {
        name: tensor.to(dtype) if tensor.dtype == torch.bfloat16 else tensor
        for shard in shards
        for name, tensor in load_file(path / shard).items()
        if not name.startswith(("vision_tower.", "mm_projector."))
    }
    return KimiK3(config, weights, dtype, chunk=chunk)
