"""The weights that training starts from."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_kimi_k3.nano.checkpoint import decay_bias
from vllm_kimi_k3.nano.layout import Spec
from vllm_kimi_k3.nano.shape import Shape


def starting_weights(shape: Shape, specs: Mapping[str, Spec], generator: torch.Generator) -> dict[str, Tensor]:
    """fp32 weights for ``specs``: quiet matrices, mixers that mix evenly, memories of 1 to 3,000 tokens."""
    weights: dict[str, Tensor] = {}
    for name, (size, kind) in specs.items():
        drawn = torch.randn(size, generator=generator)
        if kind in ("linear", "expert"):
            weights[name] = drawn * 0.5 / math.sqrt(size[-1])
        elif kind == "embedding":
            weights[name] = drawn * 0.5
        elif kind == "norm":
            weights[name] = torch.ones(size)
        elif kind == "conv":
            # The present token passes, those before it a little.
            weights[name] = drawn * 0.2 + torch.tensor([0.0] * (size[-1] - 1) + [1.0])
        elif kind == "dt_bias":
            uniform = torch.rand(size, generator=generator)
            weights[name] = decay_bias(uniform, torch.ones(shape.num_attention_heads), weakest=3e-4, strongest=1.0)
        else:
            weights[name] = torch.zeros(size)
    return weights
