"""The MLA draft over pages of latent rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.dspark.paged import PagedDraft
from vllm_kimi_k3.dspark.reference import DraftConfig, rotate
from vllm_kimi_k3.ops.latent_attention import latent_attention, store_rows


class PagedMlaDraft(PagedDraft):
    """Layout of ``Inferact/Kimi-K3-DSpark``; a row is [normalised latent | turned shared key], as the target's.

    Args:
        config: the published ``config.json``.
        weights: published name to tensor.
        embeddings: of the target.
        head: of the target.
        dtype: of weights and activations.
    """

    names = ("context_proj", "context_norm", "final_norm")

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        embeddings: Tensor,
        head: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.config = c = DraftConfig.from_dict(config)
        super().__init__(c.num_hidden_layers, c.rms_norm_eps, c.mask_token_id, weights, embeddings, head, dtype)
        self.rank, self.rope, self.nope = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim
        yarn = c.rope_parameters
        self.scale = (self.nope + self.rope) ** -0.5 * yarn.magnitude(yarn.mscale_all_dim) ** 2
        self._stretch = yarn.magnitude(yarn.mscale) / yarn.magnitude(yarn.mscale_all_dim)
        self._frequencies = c.frequencies.to(self.head.device)
        names = [f"layers.{i}.self_attn.kv_a_proj_with_mqa.weight" for i in range(self.layers)]
        self.down = torch.cat([self.weights.pop(name) for name in names])
        self.up = [
            self.weights.pop(f"layers.{i}.self_attn.kv_b_proj.weight")
            .view(c.num_attention_heads, self.nope + c.v_head_dim, self.rank)
            .split([self.nope, c.v_head_dim], dim=1)
            for i in range(self.layers)
        ]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.rank + self.rope,)

    def store(self, context: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Tensor]) -> None:
        angles = positions.unsqueeze(-1) * self._frequencies
        rows = F.linear(context, self.down).chunk(self.layers, dim=-1)
        for i, (row, cache) in enumerate(zip(rows, caches, strict=True)):
            store_rows(*self._row(i, row, angles), cache, slots)

    def _row(self, layer: int, row: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of a cached row, [T, rank] and [T, rope], from what the down-projection gives."""
        latent, shared = row.split([self.rank, self.rope], dim=-1)
        latent = self._norm(f"layers.{layer}.self_attn.kv_a_layernorm", latent)
        return latent, rotate(shared, angles, self._stretch)

    def _attend(
        self, layer: int, x: Tensor, places: Tensor, slots: Tensor, cache: Tensor, block_table: Tensor
    ) -> Tensor:
        name, c = f"layers.{layer}.self_attn", self.config
        angles = places.flatten().unsqueeze(-1) * self._frequencies
        width = self.rank + self.rope
        store_rows(*self._row(layer, F.linear(x, self.down[layer * width :][:width]), angles), cache, slots)
        low = self._norm(f"{name}.q_a_layernorm", self._linear(f"{name}.q_a_proj", x))
        q = self._linear(f"{name}.q_b_proj", low).unflatten(-1, (c.num_attention_heads, self.nope + self.rope))
        to_key, to_value = self.up[layer]
        absorbed = torch.einsum("thn,hnr->thr", q[..., : self.nope], to_key)
        turned = rotate(q[..., self.nope :], angles.unsqueeze(1), self._stretch)
        # Every slot sees the whole block, so each goes as a sequence of its own that ends where the block ends.
        blocks, width = places.shape
        mixed = torch.empty_like(absorbed)
        latent_attention(
            torch.cat([absorbed, turned], dim=-1),
            cache,
            block_table.repeat_interleave(width, 0),
            torch.arange(blocks * width + 1, dtype=torch.int32, device=x.device),
            (places[:, -1] + 1).repeat_interleave(width).int(),
            1,
            self.rank,
            self.scale,
            mixed,
        )
        return self._linear(f"{name}.o_proj", torch.einsum("thr,hvr->thv", mixed, to_value).flatten(1))
