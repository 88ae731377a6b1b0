"""Projections that read the same input, as one matrix product."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_world_size

#: Rows of a product, on a GPU, are a multiple of so many values apart.
_ALIGN = 16


@dataclass(frozen=True)
class Segment:
    """One published tensor inside a fused projection.

    Attributes:
        name: the published name of the projection, such as "q_proj".
        rows: rows of the published tensor, before slicing.
        sliced: split over tensor-parallel ranks by rows; else every rank holds all rows.
    """

    name: str
    rows: int
    sliced: bool = True


class FusedProjection(nn.Module):
    """Several bias-free linear layers on one input, their rows stacked in one weight.

    vLLM's merged layers slice all their parts; here some parts are replicated and the split points differ by part.
    The output holds the segments in order; :attr:`widths` are their sizes on this rank.
    """

    padded: torch.Tensor

    def __init__(self, inputs: int, segments: list[Segment], dtype: torch.dtype) -> None:
        super().__init__()
        size = get_tensor_model_parallel_world_size()
        self.widths = [segment.rows // size if segment.sliced else segment.rows for segment in segments]
        rows = sum(self.widths)
        # The parameter is a view of them, so that a segment of the output begins where kernels read 16 bytes at once.
        align = 1 if torch.get_default_device().type == "cpu" else _ALIGN
        self.register_buffer("padded", torch.zeros(-(-rows // align) * align, inputs, dtype=dtype), persistent=False)
        self.weight = nn.Parameter(self.padded[:rows], requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] to [T, sum(widths)]; split it by :attr:`widths`."""
        return F.linear(x, self.padded)[..., : self.weight.shape[0]]
