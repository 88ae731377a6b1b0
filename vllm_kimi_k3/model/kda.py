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
from vllm_kimi_k3.compat.graphs import leaves_graph
from vllm_kimi_k3.model.kda_state import KdaBackend, KdaMetadata, Prefills, state_dtypes, state_shapes
from vllm_kimi_k3.model.projection import FusedProjection, Segment
from vllm_kimi_k3.ops.gated_norm import gated_norm
from vllm_kimi_k3.ops.kda import kda_prefill
from vllm_kimi_k3.ops.kda_step import kda_decode_step
from vllm_kimi_k3.ops.short_conv import short_conv_prefill

#: Raw projections [T, 3 * H * D], the decay's gate [T, H, D], beta [T, H], the output gate [T, H, D].
_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


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
        heads = (self.heads, self.dim)
        out = torch.empty(x.shape[0], *heads, dtype=x.dtype, device=x.device)
        self._attend(qkv, decay.unflatten(-1, heads), beta, gate.unflatten(-1, heads), out)
        return self.o_proj(out.flatten(1))[0]

    @leaves_graph
    def _attend(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, gate: torch.Tensor, out: torch.Tensor
    ) -> None:
        """The gated norm of the recurrence's output, into ``out``; zeros for padding."""
        context = get_forward_context().attn_metadata
        inputs = (qkv, decay, beta, gate)
        if context is None:
            self._rehearse(inputs, out)
            return
        metadata: KdaMetadata = context[self.prefix]
        windows, states = self.kv_cache
        if is_conv_state_dim_first():
            windows = windows.transpose(1, 2)
        split = end = metadata.decodes
        if split:
            self._decode(_rows(inputs, slice(split)), windows, states, metadata.page_ids, out[:split])
        if metadata.prefills is not None:
            end += metadata.prefills.starts[-1]
            rest = slice(split, end)
            out[rest] = self._prefill(_rows(inputs, rest), windows, states, metadata.prefills)
        if end < out.shape[0]:
            out[end:] = 0

    def _decode(
        self, inputs: _Inputs, windows: torch.Tensor, states: torch.Tensor, pages: torch.Tensor, out: torch.Tensor
    ) -> None:
        qkv, decay, beta, gate = inputs
        constants = (self.A_log, self.dt_bias, self.lower_bound, states, pages, self.o_norm.weight, self.eps)
        kda_decode_step(qkv, decay, beta, gate, self.conv_weight, windows, *constants, out=out)

    def _prefill(
        self, inputs: _Inputs, windows: torch.Tensor, states: torch.Tensor, prefills: Prefills
    ) -> torch.Tensor:
        qkv, decay, beta, gate = inputs
        conv = short_conv_prefill(qkv, self.conv_weight, windows, *prefills.where)
        q, k, v = conv.view(-1, 3, self.heads, self.dim).unbind(1)
        constants = (self.A_log, self.dt_bias, self.lower_bound, states)
        mixed = kda_prefill(q, k, v, decay, beta, *constants, *prefills.where)
        return gated_norm(mixed, gate, self.o_norm.weight, self.eps)

    def _rehearse(self, inputs: _Inputs, out: torch.Tensor) -> None:
        """In a profiling run, which has no state: on a GPU, take the memory of the largest prefill and load kernels."""
        if out.device.type == "cpu":
            out.zero_()
            return
        windows, states = (
            torch.zeros(1, *shape, dtype=dtype, device=out.device)
            for shape, dtype in zip(self._shapes, self._dtypes, strict=True)
        )
        if is_conv_state_dim_first():
            windows = windows.transpose(1, 2)
        whole = Prefills([0, out.shape[0]], [0], [True], [])
        out.copy_(self._prefill(inputs, windows, states, whole))
        page = torch.zeros(1, dtype=torch.int32, device=out.device)
        self._decode(_rows(inputs, slice(1)), windows, states, page, out[:1])


def _rows(inputs: _Inputs, rows: slice) -> _Inputs:
    qkv, decay, beta, gate = inputs
    return qkv[rows], decay[rows], beta[rows], gate[rows]


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
