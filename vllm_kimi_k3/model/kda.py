"""The KDA layer: projections, short convolution, the gated delta rule, gated norm."""

from collections.abc import Iterable

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_kimi_k3.cache.spec import state_spec
from vllm_kimi_k3.model.kda_state import KdaBackend, KdaMetadata, state_dtypes, state_shapes
from vllm_kimi_k3.model.projection import FusedProjection, Segment
from vllm_kimi_k3.ops.gated_norm import gated_norm
from vllm_kimi_k3.ops.kda import kda_decode, kda_prefill
from vllm_kimi_k3.ops.short_conv import short_conv_decode, short_conv_prefill


class KimiDeltaAttention(nn.Module, MambaBase):
    """KDA over this tensor-parallel rank's heads.

    Args:
        text: the text config.
        vllm_config: vLLM's.
        prefix: the module's name, ending in ".self_attn".
    """

    def __init__(self, text: PretrainedConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        linear = text.linear_attn_config
        heads, self.dim = linear["num_heads"], linear["head_dim"]
        self.heads = heads // get_tensor_model_parallel_world_size()
        self.inner = self.heads * self.dim
        self.lower_bound, self.eps = linear["gate_lower_bound"], text.rms_norm_eps
        dtype, wide = vllm_config.model_config.dtype, heads * self.dim
        self.in_proj = FusedProjection(
            text.hidden_size,
            [
                Segment("q_proj", wide),
                Segment("k_proj", wide),
                Segment("v_proj", wide),
                Segment("g_proj", wide),
                Segment("f_a_proj", self.dim, sliced=False),
                Segment("b_proj", heads),
            ],
            dtype,
        )
        self.f_b_proj = ColumnParallelLinear(self.dim, wide, bias=False, prefix=f"{prefix}.f_b_proj")
        self.o_proj = RowParallelLinear(wide, text.hidden_size, bias=False, prefix=f"{prefix}.o_proj")
        self.conv_weight = _fp32(3 * self.inner, linear["short_conv_kernel_size"])
        self.A_log = _fp32(self.heads)
        self.dt_bias = _fp32(self.inner)
        self.o_norm = nn.Module()
        self.o_norm.weight = _fp32(self.dim)

        self.prefix = prefix
        self._shapes = state_shapes(text, vllm_config)
        self._dtypes = state_dtypes(vllm_config)
        self.kv_cache = (torch.empty(0), torch.empty(0))
        context = vllm_config.compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"two attention layers are named {prefix}")
        context[prefix] = self

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.GDN_ATTN

    def get_attn_backend(self) -> type[AttentionBackend]:
        return KdaBackend

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return self._shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return self._dtypes

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        return state_spec(super().get_kv_cache_spec(vllm_config), vllm_config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden], reduced over tensor-parallel ranks."""
        product = self.in_proj(x)
        qkv, gate, decay_low, beta = product.split([3 * self.inner, self.inner, self.dim, self.heads], dim=-1)
        decay = self.f_b_proj(decay_low.contiguous())[0]
        mixed = torch.zeros(x.shape[0], self.heads, self.dim, dtype=x.dtype, device=x.device)
        metadata = get_forward_context().attn_metadata
        # A profiling run has no metadata and no state.
        if metadata is not None:
            self._attend(qkv, decay.view(-1, self.heads, self.dim), beta, metadata[self.prefix], mixed)
        out = gated_norm(mixed, gate.reshape(mixed.shape), self.o_norm.weight, self.eps)
        return self.o_proj(out.flatten(1))[0]

    def _attend(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, metadata: KdaMetadata, out: torch.Tensor
    ) -> None:
        windows, states = self.kv_cache
        if is_conv_state_dim_first():
            windows = windows.transpose(1, 2)
        split, count = metadata.starts[metadata.decodes], metadata.starts[-1]
        constants = (self.A_log, self.dt_bias, self.lower_bound, states)
        if split:
            pages = metadata.page_ids[: metadata.decodes]
            q, k, v = self._heads(short_conv_decode(qkv[:split], self.conv_weight, windows, pages))
            out[:split] = kda_decode(q, k, v, decay[:split], beta[:split], *constants, pages)
        if count > split:
            starts = [start - split for start in metadata.starts[metadata.decodes :]]
            where = (starts, metadata.pages[metadata.decodes :], metadata.fresh[metadata.decodes :], metadata.exports)
            rest = slice(split, count)
            q, k, v = self._heads(short_conv_prefill(qkv[rest], self.conv_weight, windows, *where))
            out[rest] = kda_prefill(q, k, v, decay[rest], beta[rest], *constants, *where)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return qkv.view(-1, 3, self.heads, self.dim).unbind(1)


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
