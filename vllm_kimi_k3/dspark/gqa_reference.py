"""The GQA draft of DSpark in plain torch; the published layout is that of ``RedHatAI/Kimi-K3-speculator.dspark``.

Against the MLA draft: grouped queries with normed heads and plain rotary over half heads, a window over the context, a
block whose slots see only those before them, and its own embedding and head.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_kimi_k3.dspark.blocks import BlockDraft
from vllm_kimi_k3.dspark.contract import flat, taps_of
from vllm_kimi_k3.dspark.weights import read


@dataclass(frozen=True)
class GqaConfig:
    """The fields of the draft's ``config.json`` that the forward pass reads; names as published, taps 0-based."""

    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    target_layer_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "GqaConfig":
        """Read a published ``config.json``, which passed :func:`vllm_kimi_k3.dspark.contract.misfits`."""
        c = flat(config)
        theta: float = {"rope_theta": c.get("rope_theta"), **(c.get("rope_parameters") or {})}["rope_theta"]
        names = [name for name in cls.__dataclass_fields__ if name not in ("rope_theta", "target_layer_ids")]
        return cls(**{name: c[name] for name in names}, rope_theta=theta, target_layer_ids=taps_of(config))

    @property
    def frequencies(self) -> Tensor:
        """Radians a position for each of the ``head_dim / 2`` pairs, fp32."""
        return self.rope_theta ** (-2 * torch.arange(self.head_dim // 2, dtype=torch.float32) / self.head_dim)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Turn ``x`` [..., W], whose pairs lie half a width apart, by ``angles`` fp32 [..., W / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class GqaDraft(BlockDraft[GqaConfig]):
    """The draft of GQA layers over its published tensors."""

    names = ("fc", "hidden_norm", "norm")

    def _seen(self, rows: Tensor, positions: Tensor, width: int) -> Tensor:
        """A slot sees ``sliding_window`` context rows before its anchor, and the block up to itself."""
        anchors = positions.repeat_interleave(width, 1)[:, :, None]
        near = (rows[:, None, :] < anchors) & (rows[:, None, :] >= anchors - self.config.sliding_window)
        slot = torch.arange(positions.shape[1] * width, device=rows.device)
        earlier = (slot[:, None] // width == slot // width) & (slot <= slot[:, None])
        return torch.cat([near, earlier.expand(len(rows), -1, -1)], dim=-1)

    def _attention(self, name: str, x: Tensor, context: Tensor, seen: Tensor, angles: list[Tensor]) -> Tensor:
        c = self.config
        q = self._linear(f"{name}.q_proj", x).unflatten(-1, (c.num_attention_heads, c.head_dim))
        q = rotate_halves(self._norm(f"{name}.q_norm", q), angles[0].unsqueeze(2))
        joined = torch.cat([context, x], dim=1)
        k = self._linear(f"{name}.k_proj", joined).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        k = rotate_halves(self._norm(f"{name}.k_norm", k), angles[1].unsqueeze(2))
        v = self._linear(f"{name}.v_proj", joined).unflatten(-1, (c.num_key_value_heads, c.head_dim))
        shared = c.num_attention_heads // c.num_key_value_heads
        q, k, v = q.transpose(1, 2), *(y.transpose(1, 2).repeat_interleave(shared, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.unsqueeze(1), scale=c.head_dim**-0.5)
        return self._linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))


def load_gqa_draft(path: Path, dtype: torch.dtype) -> GqaDraft:
    """The draft of a directory in the published layout.

    Raises:
        DraftError: as :func:`vllm_kimi_k3.dspark.weights.read`.
    """
    config = json.loads((path / "config.json").read_text())
    weights = read(path, config)
    return GqaDraft(
        GqaConfig.from_dict(config), weights, weights["embed_tokens.weight"], weights["lm_head.weight"], dtype
    )
