"""Stable LatentMoE: experts that work in a latent space, beside shared experts on the full width."""

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from vllm.distributed import (
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from vllm_kimi_k3.compat.experts import MarlinWeights, RepackedExperts, marlin_experts, marlin_fits, repack
from vllm_kimi_k3.model.projection import FusedProjection, Segment
from vllm_kimi_k3.ops.experts import experts
from vllm_kimi_k3.ops.mxfp4 import GROUP
from vllm_kimi_k3.ops.router import router
from vllm_kimi_k3.ops.situ import situ
from vllm_kimi_k3.settings import settings

logger = init_logger("vllm.vllm_kimi_k3")


class Gate(nn.Module):
    """The router's weight and score correction."""

    def __init__(self, text: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.scale = text.num_experts_per_token, text.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(text.num_experts, text.hidden_size, dtype=dtype), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(
            torch.empty(text.num_experts, dtype=torch.float32), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to expert ids and weights, [T, top_k] each."""
        return router(x, self.weight, self.e_score_correction_bias, self.top_k, self.scale)


class RoutedExperts(nn.Module):
    """All experts' MXFP4 bytes, this tensor-parallel rank's slice of each.

    w1 and w3 are cut by rows, w2 by columns, so every rank sums over its part of the inner width.
    """

    def __init__(self, text: PretrainedConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        inner = text.moe_intermediate_size // get_tensor_model_parallel_world_size()
        self.beta = text.activation_situ_beta
        self.linear_beta = text.activation_situ_linear_beta
        count, latent = text.num_experts, text.routed_expert_hidden_size
        shapes = {
            "w13_weight_packed": (count, 2 * inner, latent // 2),
            "w13_weight_scale": (count, 2 * inner, latent // GROUP),
            "w2_weight_packed": (count, latent, inner // 2),
            "w2_weight_scale": (count, latent, inner // GROUP),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False))
        self.marlin: MarlinWeights | None = None
        wanted = settings().wanted_operations.get("experts") == "marlin"
        if wanted and marlin_fits(self.w2_weight_packed.device, inner, latent, dtype):
            self.quant_method = RepackedExperts()

    def repack(self) -> None:
        """Give the weights the layout of vLLM's Marlin kernels, which then run them; the published one is dropped."""
        names = ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale")
        w13, w13_scale, w2, w2_scale = (getattr(self, name).data for name in names)
        self.marlin = repack(w13, w13_scale, w2, w2_scale, self.dtype)
        for name in names:
            getattr(self, name).data = torch.empty(0, dtype=torch.uint8, device=self.marlin.w13.device)
        logger.info_once("experts: marlin")

    def forward(self, latent: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, latent] to this rank's part of the weighted sum over experts, [T, latent]."""
        if self.marlin is not None:
            return marlin_experts(latent, ids, weights, self.marlin, self.beta, self.linear_beta)
        return experts(
            latent,
            ids,
            weights,
            self.w13_weight_packed,
            self.w13_weight_scale,
            self.w2_weight_packed,
            self.w2_weight_scale,
            self.beta,
            self.linear_beta,
        )


class LatentMoe(nn.Module):
    """``up_proj(norm(sum of experts(down_proj(x)))) + shared(x)``.

    Args:
        text: the text config.
        dtype: of the dense weights.
        prefix: the module's name.
    """

    def __init__(self, text: PretrainedConfig, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        hidden, latent = text.hidden_size, text.routed_expert_hidden_size
        self.tp_size = get_tensor_model_parallel_world_size()
        self.gate = Gate(text, dtype)
        self.experts = RoutedExperts(text, dtype)
        self.beta, self.linear_beta = text.activation_situ_beta, text.activation_situ_linear_beta
        shared = text.num_shared_experts * text.moe_intermediate_size
        self.in_proj = FusedProjection(
            hidden,
            [
                Segment("routed_expert_down_proj", latent, sliced=False),
                Segment("shared_experts.gate_proj", shared),
                Segment("shared_experts.up_proj", shared),
            ],
            dtype,
        )
        self.routed_expert_up_proj = ReplicatedLinear(
            latent, hidden, bias=False, prefix=f"{prefix}.routed_expert_up_proj"
        )
        self.routed_expert_norm = RMSNorm(latent, text.rms_norm_eps)
        self.shared_down_proj = RowParallelLinear(
            shared, hidden, bias=False, reduce_results=False, prefix=f"{prefix}.shared_down_proj"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden]."""
        ids, weights = self.gate(x)
        product = self.in_proj(x)
        latent = self.in_proj.widths[0]
        routed = self.experts(product[..., :latent], ids, weights)
        shared = self.shared_down_proj(situ(product[..., latent:], self.beta, self.linear_beta))[0]
        if self.tp_size > 1:
            # The norm needs the whole latent sum; one collective carries it and the shared experts' sum together.
            both = tensor_model_parallel_all_reduce(torch.cat([routed, shared], dim=-1))
            routed, shared = both.split([routed.shape[-1], shared.shape[-1]], dim=-1)
        return self.routed_expert_up_proj(self.routed_expert_norm(routed.contiguous()))[0] + shared
