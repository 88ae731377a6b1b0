"""The vision tower and projector in plain torch: the oracle of their tests, and what the miniature's are trained with.

One image, or a batch of images of one size in leading axes. Shapes: L patches in rows from the top left, D the tower's
width, N heads of width K, H the text model's width.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: eps of the tower's norms: torch's own for fp32, whatever the dtype.
NORM_EPS = torch.finfo(torch.float32).eps
_THETA = 10000.0


def normalise(patches: Tensor) -> Tensor:
    """uint8 patches in fp32, from -1 to 1."""
    return (patches.float() / 255 - 0.5) / 0.5


def position_embedding(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The learned grid [h, w, D], interpolated to [rows * columns, D]: bilinear, without antialias."""
    if (rows, columns) == weight.shape[:2]:
        return weight.flatten(0, 1)
    grid = weight.float().permute(2, 0, 1).unsqueeze(0)
    resized = F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=False)
    return resized[0].permute(1, 2, 0).flatten(0, 1).to(weight.dtype)


def rotary_angles(rows: Tensor, columns: Tensor, dim: int) -> Tensor:
    """Angles fp32 [L, dim / 2] of patches at ``rows`` and ``columns`` [L]: x_0, y_0, x_1, y_1, … with x the column.

    Of ``dim / 4`` frequencies the j-th is ``10000^(-4j / dim)``.
    """
    frequencies = _THETA ** (-torch.arange(0, dim, 4, dtype=torch.float32, device=rows.device) / dim)
    x, y = (where.float().unsqueeze(-1) * frequencies for where in (columns, rows))
    return torch.stack([x, y], dim=-1).flatten(-2)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs of [..., L, N, K] by the angles [L, K / 2]."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2).to(x.dtype)


def merge(x: Tensor, rows: int, columns: int, kernel: tuple[int, int]) -> Tensor:
    """[..., rows * columns, D] to [..., tokens, kh * kw * D]: the patches of a token side by side, row by row."""
    kh, kw = kernel
    grid = x.unflatten(-2, (rows // kh, kh, columns // kw, kw)).transpose(-4, -3)
    return grid.flatten(-3).flatten(-3, -2)


class VisionReference:
    """Tower and projector over a dict of published tensor names.

    Args:
        config: ``vision_config`` of a K3 config.
        weights: published name to tensor; cast where they are used, so fp32 parameters can be trained.
        dtype: of the activations.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self.config = config
        self.weights = weights
        self.dtype = dtype

    def embed(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """Embeddings [..., tokens, H] of images from their uint8 patches [..., L, 3, 14, 14]."""
        return self.project(self.encode(patches, rows, columns)[-1], rows, columns)

    def encode(self, patches: Tensor, rows: int, columns: int) -> list[Tensor]:
        """What leaves the patch embedding, each block, and the final norm; [..., L, D] each."""
        config, tower = self.config, "vision_tower"
        x = normalise(patches).to(self.dtype).flatten(-3)
        x = F.linear(x, self._w(f"{tower}.patch_embed.proj").flatten(1))
        x = x + position_embedding(self._w(f"{tower}.patch_embed.pos_emb"), rows, columns)
        place = torch.arange(rows * columns, device=x.device)
        heads = config["vt_num_attention_heads"]
        angles = rotary_angles(place // columns, place % columns, config["qkv_hidden_size"] // heads)
        stages = [x]
        for i in range(config["vt_num_hidden_layers"]):
            block = f"{tower}.encoder.blocks.{i}"
            x = x + self._attention(block, self._norm(f"{block}.norm0", x, NORM_EPS), angles, heads)
            x = x + self._mlp(f"{block}.mlp", self._norm(f"{block}.norm1", x, NORM_EPS))
            stages.append(x)
        return [*stages, self._norm(f"{tower}.encoder.final_layernorm", x, NORM_EPS)]

    def project(self, encoded: Tensor, rows: int, columns: int) -> Tensor:
        """Merge [..., L, D] and project it: [..., tokens, H]."""
        merged = merge(encoded, rows, columns, tuple(self.config["merge_kernel_size"]))
        inner = F.gelu(F.linear(merged, self._w("mm_projector.proj.0")))
        out = F.linear(inner, self._w("mm_projector.proj.2"))
        return self._norm("mm_projector.post_norm", out, self.config["projector_ln_eps"])

    def _attention(self, block: str, x: Tensor, angles: Tensor, heads: int) -> Tensor:
        q, k, v = F.linear(x, self._w(f"{block}.wqkv")).unflatten(-1, (3, heads, -1)).unbind(-3)
        q, k = rotate(q, angles), rotate(k, angles)
        scores = torch.einsum("...lnk,...mnk->...nlm", q, k).float() * q.shape[-1] ** -0.5
        attended = torch.einsum("...nlm,...mnk->...lnk", scores.softmax(-1).to(self.dtype), v)
        return F.linear(attended.flatten(-2), self._w(f"{block}.wo"))

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        inner = F.gelu(F.linear(x, self._w(f"{name}.fc0")), approximate="tanh")
        return F.linear(inner, self._w(f"{name}.fc1"))

    def _norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w(name), eps)

    def _w(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight"].to(self.dtype)
