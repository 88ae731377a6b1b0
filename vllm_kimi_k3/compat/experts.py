"""vLLM's Marlin kernels for MXFP4 experts: bf16 activations, weights repacked once after loading."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase


@dataclass
class MarlinWeights:
    """All experts' weights in Marlin's layout, as :func:`repack` makes them, and its locks."""

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    workspace: torch.Tensor


def marlin_fits(device: torch.device, inner: int, latent: int, dtype: torch.dtype) -> bool:
    """0.33, CUDA: whether Marlin runs on a device for experts of these sizes.

    Args:
        device: where the experts lie.
        inner: an expert's inner rows on this rank.
        latent: width of its input and output.
        dtype: of the activations.
    """
    if device.type != "cuda" or torch.version.cuda is None or dtype not in (torch.bfloat16, torch.float16):
        return False
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import is_fp4_marlin_supported

    return bool(is_fp4_marlin_supported()) and inner % 64 == 0 and latent % 128 == 0


def repack(
    w13: torch.Tensor, w13_scale: torch.Tensor, w2: torch.Tensor, w2_scale: torch.Tensor, dtype: torch.dtype
) -> MarlinWeights:
    """Published layout to Marlin's; the shapes stand at
    :func:`~vllm_kimi_k3.ops.experts.reference.experts_reference`.
    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin

    layer = SimpleNamespace(params_dtype=dtype)
    made = prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, w13_scale, w2_scale, None, None)
    return MarlinWeights(made[0], made[2], made[1], made[3], marlin_make_workspace_new(w13.device, 4))


def marlin_experts(
    latent: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: MarlinWeights,
    beta: float,
    linear_beta: float | None,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.experts.reference.experts_reference`, from repacked weights."""
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    return fused_marlin_moe(
        latent.contiguous(),
        packed.w13,
        packed.w2,
        None,
        None,
        packed.w13_scale,
        packed.w2_scale,
        weights,
        ids,
        quant_type_id=scalar_types.float4_e2m1f.id,
        activation=MoEActivation.SITU,
        activation_config=ApplyMoEActivationConfig(activation_situ_beta=beta, activation_situ_linear_beta=linear_beta),
        workspace=packed.workspace,
    )


class RepackedExperts(QuantizeMethodBase):
    """Tells vLLM's loader to have a layer's experts repacked; the layer has a method ``repack`` for it."""

    def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        raise NotImplementedError("the layer makes its own weights")

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError("the layer runs itself")

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.repack()
