"""MLA over the paged latent cache on platforms whose own MLA kernels vLLM does not run for K3.

The layer holds the cache rows ``[normalised latent | shared key]``; its backend tells vLLM their size, and its
metadata is what the attention operation needs to find them.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, MLAAttentionSpec

from vllm_kimi_k3.cache.spec import row_spec
from vllm_kimi_k3.cache.unit import HASH_UNITS
from vllm_kimi_k3.compat.graphs import decode_graphs, leaves_graph
from vllm_kimi_k3.ops.latent_attention import latent_attention, store_rows


@dataclass
class LatentMetadata(AttentionMetadata):
    """Where the sequences of a batch lie.

    Attributes:
        starts: [N + 1] int32, token offsets of the sequences in the batch.
        lengths: [N] int32, the batch's tokens included.
        longest: at least as many tokens as any sequence has in the batch.
        block_table: [N, max_blocks] int32.
        slot_mapping: [T] int64, the cache row of every token; -1 for padding.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class LatentMetadataBuilder(AttentionMetadataBuilder[LatentMetadata]):
    """Builds :class:`LatentMetadata`; nothing about it depends on the layers."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        device = torch.device(vllm_config.device_config.device_type)
        return decode_graphs(latent_attention.has_kernel(device) and store_rows.has_kernel(device))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> LatentMetadata:
        """As vLLM's interface says; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        common = common_attn_metadata
        return LatentMetadata(
            starts=common.query_start_loc[: common.num_reqs + 1],
            lengths=common.seq_lens[: common.num_reqs],
            longest=common.max_query_len,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class LatentBackend(AttentionBackend):
    """Tells vLLM about the pages; there is no implementation class, the layer runs the operation itself."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "KIMI_K3_LATENT"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("K3's MLA layer runs its attention itself")

    @staticmethod
    def get_builder_cls() -> type[LatentMetadataBuilder]:
        return LatentMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        # Pages must hold whole hash units. vLLM's CPU pages do; elsewhere it makes pages multiples of this.
        return [MultipleOf(1 if current_platform.is_cpu() else max(HASH_UNITS))]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> MLAAttentionSpec:
        """One latent row a token, instead of a key and a value; a layer's own spec has that already."""
        if isinstance(spec, MLAAttentionSpec):
            return spec
        return MLAAttentionSpec(block_size=spec.block_size, num_kv_heads=1, head_size=spec.head_size, dtype=spec.dtype)


class LatentAttention(nn.Module, AttentionLayerBase):
    """Writes latent rows to the paged cache and attends to them.

    Args:
        rank: width of the latent.
        rope: width of the shared key.
        scale: of the scores.
        prefix: the layer's name in vLLM's forward context.
    """

    def __init__(self, rank: int, rope: int, scale: float, prefix: str) -> None:
        super().__init__()
        self.rank, self.rope, self.scale, self.name = rank, rope, scale, prefix
        self.kv_cache = torch.empty(0)
        context = get_current_vllm_config().compilation_config.static_forward_context
        if prefix in context:
            raise ValueError(f"two attention layers are named {prefix}")
        context[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return LatentBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec = MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=1,
            head_size=self.rank + self.rope,
            dtype=vllm_config.model_config.dtype,
        )
        return row_spec(spec, vllm_config)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """[blocks, 1, block_size, rank + rope] from vLLM, kept without the head axis."""
        self.kv_cache = kv_cache.squeeze(1)

    def forward(self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor) -> torch.Tensor:
        """Cache this batch's rows, then attend.

        Args:
            query: [T, H, rank + rope], in latent space.
            latent: [T, rank], normalised.
            shared_key: [T, rope].

        Returns:
            [T, H, rank]; zeros in a profiling run, which has no cache.
        """
        out = torch.empty_like(query[..., : self.rank], memory_format=torch.contiguous_format)
        self._attend(query, latent, shared_key, out)
        return out

    @leaves_graph
    def _attend(self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, out: torch.Tensor) -> None:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            out.zero_()
            return
        own = metadata[self.name]
        count = own.slot_mapping.shape[0]
        store_rows(latent[:count], shared_key[:count], self.kv_cache, own.slot_mapping)
        where = (own.block_table, own.starts, own.lengths, own.longest)
        latent_attention(query, self.kv_cache, *where, self.rank, self.scale, out)
