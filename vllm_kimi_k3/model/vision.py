"""MoonViT-V2 and its projector: all images of a step as one sequence, each attending to itself alone.

Every rank holds the whole tower, since its 12 heads do not divide by 8; :mod:`vllm_kimi_k3.model.vision_share` deals
the images out instead. Parameters are named as published.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

from vllm_kimi_k3.ops.rotary import rotary
from vllm_kimi_k3.vision_reference import NORM_EPS, merge, normalise, position_embedding, rotary_angles


class Grid(NamedTuple):
    """Patches of one image: ``rows`` of ``columns``."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _PositionEmbedding(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        once = {grid: position_embedding(self.weight, *grid) for grid in set(grids)}
        return torch.cat([once[grid] for grid in grids])


class _PatchEmbedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width, patch = config.vt_hidden_size, config.patch_size
        self.proj = nn.Conv2d(3, width, patch, patch, bias=False)
        self.pos_emb = _PositionEmbedding(config.init_pos_emb_height, config.init_pos_emb_width, width)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        weight = self.proj.weight
        x = F.linear(normalise(patches).to(weight.dtype).flatten(1), weight.flatten(1))
        return x + self.pos_emb(grids)


class Pack(NamedTuple):
    """What attention knows about the images of a pass.

    Attributes:
        cos, sin: fp32 [L, K / 2], of the rotary angles.
        bounds: int32 [images + 1], where each image's patches begin, as the attention backend wants it.
        longest: int32, the most patches of an image, on the CPU.
        lengths: of the images, for the one backend that asks for them.
    """

    cos: Tensor
    sin: Tensor
    bounds: Tensor
    longest: Tensor
    lengths: Tensor | None


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc0 = nn.Linear(width, inner, bias=False)
        self.fc1 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        width, qkv, self.heads = config.vt_hidden_size, config.qkv_hidden_size, config.vt_num_attention_heads
        self.wqkv = nn.Linear(width, 3 * qkv, bias=False)
        self.wo = nn.Linear(qkv, width, bias=False)
        self.attend = MMEncoderAttention(self.heads, qkv // self.heads, prefix=f"{prefix}.attn")
        self.norm0, self.norm1 = _Norm(width, NORM_EPS), _Norm(width, NORM_EPS)
        self.mlp = _MLP(width, config.vt_intermediate_size)

    def forward(self, x: Tensor, pack: Pack) -> Tensor:
        qkv = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1))
        rotary(qkv, pack.cos, pack.sin)
        # Views of one tensor, as vLLM's own towers hand them over: a backend computes the values' place from that.
        attended = self.attend(*qkv.unsqueeze(0).unbind(2), pack.bounds, pack.longest, pack.lengths)
        x = x + self.wo(attended.reshape(x.shape[0], -1))
        return x + self.mlp(self.norm1(x))


class _Encoder(nn.Module):
    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        count = config.vt_num_hidden_layers
        self.blocks = nn.ModuleList(_Block(config, f"{prefix}.blocks.{i}") for i in range(count))
        self.final_layernorm = _Norm(config.vt_hidden_size, NORM_EPS)


class VisionTower(nn.Module):
    """The tower of a K3.

    Args:
        config: ``vision_config``.
        prefix: of its name in the model.
    """

    def __init__(self, config: Any, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.qkv_hidden_size // config.vt_num_attention_heads
        self.qkv_width = config.qkv_hidden_size
        self.patch_embed = _PatchEmbedding(config)
        self.encoder = _Encoder(config, f"{prefix}.encoder")

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """uint8 patches [L, 3, 14, 14] of all images, one image after the other, to [L, D]."""
        x = self.patch_embed(patches, grids)
        pack = self._pack(grids, x.device)
        for block in self.encoder.blocks:
            x = block(x, pack)
        return self.encoder.final_layernorm(x)

    def _pack(self, grids: Sequence[Grid], device: torch.device) -> Pack:
        place = torch.cat([torch.cartesian_prod(torch.arange(grid.rows), torch.arange(grid.columns)) for grid in grids])
        place = place.to(device, non_blocking=True)
        angles = rotary_angles(place[:, 0], place[:, 1], self.head_dim)
        bounds = np.cumsum([0, *(grid.patches for grid in grids)], dtype=np.int32)
        backend = self.encoder.blocks[0].attend.attn_backend
        return Pack(
            angles.cos(),
            angles.sin(),
            MMEncoderAttention.maybe_recompute_cu_seqlens(backend, bounds, self.qkv_width, 1, device),
            torch.tensor(MMEncoderAttention.compute_max_seqlen(backend, bounds), dtype=torch.int32),
            MMEncoderAttention.maybe_compute_seq_lens(backend, bounds, device),
        )


class Projector(nn.Module):
    """From the tower's patches to the text model's embeddings.

    Args:
        config: ``vision_config``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.kernel: tuple[int, int] = tuple(config.merge_kernel_size)
        merged = config.vt_hidden_size * self.kernel[0] * self.kernel[1]
        self.width = config.text_hidden_size
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, bias=False), nn.GELU(), nn.Linear(merged, self.width, bias=False)
        )
        self.post_norm = _Norm(self.width, config.projector_ln_eps)

    def forward(self, encoded: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[L, D] of all images to their tokens [T, H]."""
        images = encoded.split([grid.patches for grid in grids])
        merged = torch.cat([merge(x, *grid, self.kernel) for x, grid in zip(images, grids, strict=True)])
        return self.post_norm(self.proj(merged))

    def tokens(self, grid: Grid) -> int:
        """How many tokens an image of this grid gives."""
        return grid.patches // (self.kernel[0] * self.kernel[1])
