"""From published tensor names to the model's parameters."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

_IN_PROJ = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj", "q_a_proj", "kv_a_proj_with_mqa")

#: end of a published name, without ".weight" -> end of the parameter's name, arguments of its loader
_PLACES: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{f"self_attn.{name}": ("self_attn.in_proj.weight", (name,)) for name in _IN_PROJ},
    "self_attn.kv_b_proj": ("self_attn.kv_b_proj.weight", ("kv_b_proj",)),
    **{f"self_attn.{name}_conv1d": ("self_attn.conv_weight", (f"{name}_conv1d",)) for name in "qkv"},
    **{
        f"{mlp}.{name}_proj": (f"{mlp}.gate_up_proj.weight", (shard,))
        for mlp in ("mlp", "block_sparse_moe.shared_experts")
        for shard, name in enumerate(("gate", "up"))
    },
    **{
        f"{site}_{part}": (f"{site}.{part}_weight", ())
        for site in ("self_attention_res", "mlp_res", "output_attn_res")
        for part in ("norm", "proj")
    },
}
_LAYER = re.compile(r"(.*\.layers\.\d+\.|model\.)(.+?)(?:\.weight)?$")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123])\.(weight_packed|weight_scale)$")


def place(name: str) -> tuple[str, tuple[Any, ...]]:
    """Parameter and loader arguments of a published tensor.

    Args:
        name: the published name without the leading ``language_model.``.
    """
    expert = _EXPERT.match(name)
    if expert:
        stack = "w2" if expert[3] == "w2" else "w13"
        return f"{expert[1]}.{stack}_{expert[4]}", (expert[3], int(expert[2]))
    split = _LAYER.match(name)
    if split and split[2] in _PLACES:
        parameter, arguments = _PLACES[split[2]]
        return split[1] + parameter, arguments
    return name, ()


def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Fill a model's parameters from published tensors, one alive at a time.

    Args:
        model: the text model; its parameters are named as :func:`place` says.
        weights: published name without the leading ``language_model.``, and tensor.

    Returns:
        the names of the parameters that were filled.
    """
    parameters = dict(model.named_parameters())
    filled = set()
    for name, tensor in weights:
        target, arguments = place(name)
        parameter = parameters[target]
        loader = getattr(parameter, "weight_loader", default_weight_loader)
        loader(parameter, tensor, *arguments)
        filled.add(target)
    return filled
