"""The text model over batches of sequences, for training: a twin of ``reference.py`` that is tested equal to it.

Parameters are fp32 and are cast where they are used, so what is trained is what the bf16 checkpoint computes. Experts
are stacked, rounded to MXFP4 on the way, and all of them run on every token: for eight small ones that costs less than
sorting tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_kimi_k3.nano import layers
from vllm_kimi_k3.nano.chunked import CHUNK, states_before
from vllm_kimi_k3.nano.layout import text_tensors
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.reference import rms_norm

_ROOT = "language_model.model"
_COMPILED = ("mix", "kda_before", "kda_after", "mla_before", "mla_after", "mlp", "moe", "token_losses")


class Output(NamedTuple):
    """What the layers give.

    ``hidden`` [B, T, H] after the final mix and before the final norm; the asked ``taps``, [B, T, H] each; the router
    ``scores`` of the MoE layers, fp32 [layers, B, T, experts].
    """

    hidden: Tensor
    taps: list[Tensor]
    scores: Tensor


class BatchedK3(nn.Module):
    """A miniature K3 over [B, T] token ids, every sequence from an empty state.

    Args:
        shape: of the model.
        weights: fp32 by published name, experts unpacked; copied into parameters.
        dtype: of the activations.
        compiled: compile the layers; for batches that all have the same number of tokens.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype, *, compiled: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.names = _stacked_names(shape)
        self._run: dict[str, Callable[..., Any]] = {name: getattr(layers, name) for name in _COMPILED}
        if compiled:
            self._run = {name: torch.compile(function, dynamic=False) for name, function in self._run.items()}
        for own, published in self.names.items():
            found = [weights[name].float() for name in published]
            value = torch.stack(found) if len(found) > 1 else found[0].clone()
            trained = not own.endswith("e_score_correction_bias")
            self.register_parameter(_flat(own), nn.Parameter(value, requires_grad=trained))

    def published(self) -> dict[str, Tensor]:
        """The parameters by published name, experts unstacked."""
        found: dict[str, Tensor] = {}
        for own, published in self.names.items():
            value = self.get_parameter(_flat(own)).detach()
            found |= zip(published, value if len(published) > 1 else [value], strict=True)
        return found

    def router_biases(self) -> list[Tensor]:
        """The correction biases of the MoE layers, in order; fp32 [experts], set by the router's balance."""
        return [self.get_parameter(_flat(n)) for n in self.names if n.endswith("e_score_correction_bias")]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., H] of ids int64 [...]."""
        return F.embedding(ids, self._w(f"{_ROOT}.embed_tokens"))

    def forward(self, ids: Tensor, taps: tuple[int, ...] = ()) -> Output:
        """Run all layers.

        Args:
            ids: int64 [B, T].
            taps: 0-based layers whose outgoing prefix stream is wanted.
        """
        return self.run(self.embed(ids), taps)

    def run(self, embeddings: Tensor, taps: tuple[int, ...] = ()) -> Output:
        """Like :meth:`forward`, from embeddings [B, T, H]."""
        batch, length, _ = embeddings.shape
        embeddings = F.pad(embeddings, (0, 0, 0, -length % CHUNK))
        prefix = embeddings.flatten(0, 1)
        position = torch.arange(embeddings.shape[1], device=embeddings.device).repeat(batch)
        blocks, streams, scores = list[Tensor](), {}, []
        for i in range(self.shape.num_hidden_layers):
            layer = f"{_ROOT}.layers.{i}"
            mixed = self._mix(f"{layer}.self_attention_res", prefix, blocks) if blocks else prefix
            starts = i % self.shape.attn_res_block_size == 0
            if starts:
                blocks.append(prefix)
            attention = self._mla if i in self.shape.mla_layers else self._kda
            attended = attention(f"{layer}.self_attn", mixed, position, self._w(f"{layer}.input_layernorm"), batch)
            prefix = attended if starts else prefix + attended
            mixed = self._mix(f"{layer}.mlp_res", prefix, blocks)
            norm = self._w(f"{layer}.post_attention_layernorm")
            if i == 0:
                out = self._run["mlp"](mixed, norm, *self._mlp(f"{layer}.mlp"))
            else:
                out, score = self._moe(f"{layer}.block_sparse_moe", mixed, norm)
                scores.append(score)
            prefix = streams[i] = prefix + out
        hidden = self._mix(f"{_ROOT}.output_attn_res", prefix, blocks)

        def whole(x: Tensor) -> Tensor:
            return x.unflatten(0, (batch, -1))[:, :length]

        return Output(whole(hidden), [whole(streams[i]) for i in taps], torch.stack([whole(s) for s in scores]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., H] to [..., vocabulary]."""
        return F.linear(rms_norm(hidden, self._w(f"{_ROOT}.norm"), layers.EPS), self._w("language_model.lm_head"))

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy fp32 [B, T] of ``targets`` int64 [B, T]."""
        head = self._w(f"{_ROOT}.norm"), self._w("language_model.lm_head")
        return self._run["token_losses"](hidden.flatten(0, 1), *head, targets.flatten()).view(targets.shape)

    def _w(self, name: str) -> Tensor:
        return self._fp32(f"{name}.weight").to(self.dtype)

    def _fp32(self, name: str) -> Tensor:
        return self.get_parameter(_flat(name))

    def _mix(self, name: str, prefix: Tensor, blocks: list[Tensor]) -> Tensor:
        mixed: Tensor = self._run["mix"](prefix, list(blocks), self._w(f"{name}_norm"), self._w(f"{name}_proj"))
        return mixed

    def _mlp(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        return self._w(f"{name}.gate_proj"), self._w(f"{name}.up_proj"), self._w(f"{name}.down_proj")

    def _kda(self, name: str, x: Tensor, position: Tensor, norm: Tensor, batch: int) -> Tensor:
        heads = self.shape.num_attention_heads
        joined = torch.cat([self._w(f"{name}.{p}_proj") for p in ("q", "k", "v", "g", "f_a", "b")])
        taps = torch.cat([self._w(f"{name}.{p}_conv1d") for p in ("q", "k", "v")])
        decay = self._fp32(f"{name}.A_log"), self._fp32(f"{name}.dt_bias"), self._w(f"{name}.f_b_proj")
        chunks, gate = self._run["kda_before"](x, position, norm, joined, taps, *decay, heads)
        states = states_before(chunks.step.unflatten(0, (batch, -1, heads))).flatten(0, 2)
        out: Tensor = self._run["kda_after"](
            chunks, states, gate, self._w(f"{name}.o_norm"), self._w(f"{name}.o_proj"), heads
        )
        return out

    def _mla(self, name: str, x: Tensor, position: Tensor, norm: Tensor, batch: int) -> Tensor:
        del position  # no position encoding
        joined = torch.cat([self._w(f"{name}.{p}") for p in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")])
        norms = self._w(f"{name}.q_a_layernorm"), self._w(f"{name}.kv_a_layernorm")
        ups = self._w(f"{name}.q_b_proj"), self._w(f"{name}.kv_b_proj")
        widths = self.shape.qk_nope_head_dim, self.shape.qk_rope_head_dim
        *qkv, gate = self._run["mla_before"](x, norm, joined, *norms, *ups, *widths)
        q, k, v = (y.unflatten(0, (batch, -1)).transpose(1, 2) for y in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1).flatten(1)
        out: Tensor = self._run["mla_after"](attended, gate, self._w(f"{name}.o_proj"))
        return out

    def _moe(self, name: str, x: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        router = self._w(f"{name}.gate"), self._fp32(f"{name}.gate.e_score_correction_bias")
        latent = tuple(self._w(f"{name}.routed_expert_{p}") for p in ("down_proj", "norm", "up_proj"))
        experts = tuple(self._fp32(f"{name}.experts.{w}") for w in ("w1", "w3", "w2"))
        shared = self._mlp(f"{name}.shared_experts")
        top_k = self.shape.num_experts_per_token
        out: tuple[Tensor, Tensor] = self._run["moe"](x, norm, *router, top_k, latent, experts, shared)
        return out


def _flat(name: str) -> str:
    """torch allows no dots in the name of a parameter."""
    return name.replace(".", "/")


def _stacked_names(shape: Shape) -> dict[str, list[str]]:
    """Name of a parameter to the published names of its rows: the experts of a layer are stacked."""
    names: dict[str, list[str]] = {}
    for name, spec in text_tensors(shape).items():
        own = name
        if spec.kind == "expert":
            layer, _, which = name.removesuffix(".weight").rpartition(".experts.")
            own = f"{layer}.experts.{which.partition('.')[2]}"
        names.setdefault(own, []).append(name)
    return names
