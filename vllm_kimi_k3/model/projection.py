"""Projections that read the same input, as one matrix product."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.utils import set_weight_attrs


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

    def __init__(self, inputs: int, segments: list[Segment], dtype: torch.dtype) -> None:
        super().__init__()
        self.rank = get_tensor_model_parallel_rank()
        size = get_tensor_model_parallel_world_size()
        self.segments = segments
        self.widths = [segment.rows // size if segment.sliced else segment.rows for segment in segments]
        self.weight = nn.Parameter(torch.empty(sum(self.widths), inputs, dtype=dtype), requires_grad=False)
        set_weight_attrs(self.weight, {"weight_loader": self.load_segment})

    def load_segment(self, parameter: nn.Parameter, tensor: torch.Tensor, name: str) -> None:
        """Copy this rank's rows of one published tensor into its place.

        Args:
            parameter: the fused weight.
            tensor: [rows, inputs], the published tensor.
            name: the segment's name.
        """
        index = next(i for i, segment in enumerate(self.segments) if segment.name == name)
        width = self.widths[index]
        if self.segments[index].sliced:
            tensor = tensor.narrow(0, self.rank * width, width)
        parameter.data.narrow(0, sum(self.widths[:index]), width).copy_(tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] to [T, sum(widths)]; split it by :attr:`widths`."""
        return F.linear(x, self.weight)
