"""The dense SiTU MLP of the first layer."""

import torch
from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

from vllm_kimi_k3.ops.situ import situ


class SituMlp(nn.Module):
    """``down_proj(SiTU(gate_proj(x), up_proj(x)))``.

    Args:
        hidden: width of input and output.
        inner: width between them.
        beta, linear_beta: of SiTU.
        prefix: the module's name.
    """

    def __init__(self, hidden: int, inner: int, beta: float, linear_beta: float | None, prefix: str) -> None:
        super().__init__()
        self.beta, self.linear_beta = beta, linear_beta
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(inner, hidden, bias=False, prefix=f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden], reduced over tensor-parallel ranks."""
        return self.down_proj(situ(self.gate_up_proj(x)[0], self.beta, self.linear_beta))[0]
