"""The GQA draft over pages of keys and values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.dspark.gqa_reference import GqaConfig, rotate_halves
from vllm_kimi_k3.dspark.paged import PagedDraft
from vllm_kimi_k3.ops.window_attention import window_attention


class PagedGqaDraft(PagedDraft):
    """Layout of ``RedHatAI/Kimi-K3-speculator.dspark``; a row is the normed, turned keys and the values.

    Args:
        config: the published ``config.json``.
        weights: published name to tensor, embedding and head among them.
        dtype: of weights and activations.
    """

    names = ("fc", "hidden_norm", "norm")

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.config = c = GqaConfig.from_dict(config)
        own = dict(weights)
        shared = own.pop("embed_tokens.weight"), own.pop("lm_head.weight")
        super().__init__(c.num_hidden_layers, c.rms_norm_eps, c.mask_token_id, own, *shared, dtype)
        self._frequencies = c.frequencies.to(self.head.device)
        self.keys_values = torch.cat(
            [
                self.weights.pop(f"layers.{i}.self_attn.{part}_proj.weight")
                for i in range(self.layers)
                for part in ("k", "v")
            ]
        )

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (2, self.config.num_key_value_heads, self.config.head_dim)

    def store(self, context: Tensor, positions: Tensor, slots: Tensor, caches: Sequence[Tensor]) -> None:
        angles = positions.unsqueeze(-1) * self._frequencies
        rows = F.linear(context, self.keys_values).chunk(self.layers, dim=-1)
        for i, (row, cache) in enumerate(zip(rows, caches, strict=True)):
            self._write(i, row, angles, slots, cache)

    def _write(self, layer: int, row: Tensor, angles: Tensor, slots: Tensor, cache: Tensor) -> None:
        keys, values = row.unflatten(-1, self.row_shape).unbind(1)
        keys = rotate_halves(self._norm(f"layers.{layer}.self_attn.k_norm", keys), angles.unsqueeze(1))
        kept = slots >= 0
        cache.view(-1, *self.row_shape)[slots[kept]] = torch.stack([keys, values], dim=1)[kept].to(cache.dtype)

    def _attend(
        self, layer: int, x: Tensor, places: Tensor, slots: Tensor, cache: Tensor, block_table: Tensor
    ) -> Tensor:
        name, c = f"layers.{layer}.self_attn", self.config
        angles = places.flatten().unsqueeze(-1) * self._frequencies
        width = 2 * c.num_key_value_heads * c.head_dim
        self._write(layer, F.linear(x, self.keys_values[layer * width :][:width]), angles, slots, cache)
        q = self._linear(f"{name}.q_proj", x).unflatten(-1, (c.num_attention_heads, c.head_dim))
        blocks, count = places.shape
        mixed = window_attention(
            rotate_halves(self._norm(f"{name}.q_norm", q), angles.unsqueeze(1)),
            cache,
            block_table,
            torch.arange(0, blocks * count + 1, count, device=x.device),
            (places[:, 0] - c.sliding_window).clamp(min=0),
            places[:, -1] + 1,
            c.head_dim**-0.5,
        )
        return self._linear(f"{name}.o_proj", mixed.flatten(1))
