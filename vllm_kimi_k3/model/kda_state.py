"""The state of a KDA layer as vLLM holds it: pages, their shapes, and where a batch's sequences lie in them."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_kimi_k3.cache.exports import step_exports


def state_shapes(text: PretrainedConfig, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
    """Shapes of a page on one rank: the conv window [rows, 3 * heads * dim] and the state [heads, V, K]."""
    linear = text.linear_attn_config
    return MambaStateShapeCalculator.kda_state_shape(
        vllm_config.parallel_config.tensor_parallel_size,
        linear["num_heads"],
        linear["head_dim"],
        conv_kernel_size=linear["short_conv_kernel_size"],
        num_spec=vllm_config.num_speculative_tokens,
    )


def state_dtypes(vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes of a page: the window in the model's dtype, the state in fp32 unless the cache settings say bf16."""
    cache = vllm_config.cache_config
    return MambaStateDtypeCalculator.kda_state_dtype(
        vllm_config.model_config.dtype, cache.mamba_cache_dtype, cache.mamba_ssm_cache_dtype
    )


@dataclass
class KdaMetadata(AttentionMetadata):
    """Where the sequences of a batch lie. The first ``decodes`` sequences have one token and a state already.

    Attributes:
        starts: N + 1 token offsets of the sequences in the batch.
        pages: N pages of their states.
        page_ids: the same as a tensor, [N] int64.
        fresh: N flags: the sequence begins in this batch.
        decodes: how many leading sequences are decodes.
        exports: (sequence, tokens, page): states to keep after that many of a sequence's tokens; ``sequence`` counts
            from the first one that is not a decode.
    """

    starts: list[int]
    pages: list[int]
    page_ids: torch.Tensor
    fresh: list[bool]
    decodes: int
    exports: list[tuple[int, int, int]] = field(default_factory=list)


class KdaMetadataBuilder(AttentionMetadataBuilder[KdaMetadata]):
    """Builds :class:`KdaMetadata` for all layers of one cache group."""

    reorder_batch_threshold = 1
    kv_cache_spec: MambaSpec

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mode = vllm_config.cache_config.mamba_cache_mode

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KdaMetadata:
        """As vLLM's interface says; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        common = common_attn_metadata
        count = common.num_reqs
        table = mamba_get_block_table_tensor(common.block_table_tensor, common.seq_lens, self.kv_cache_spec, self.mode)
        page_ids = table[:count, 0].long()
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        lengths = common.seq_lens[:count].tolist()
        new = [stop - start for start, stop in itertools.pairwise(starts)]
        fresh = [tokens == length for tokens, length in zip(new, lengths, strict=True)]
        decodes = 0
        while decodes < count and new[decodes] == 1 and not fresh[decodes]:
            decodes += 1
        exports = []
        if self.mode == "align" and decodes < count:
            rows = common.block_table_tensor[decodes:count].tolist()
            exports = step_exports(rows, lengths[decodes:], new[decodes:], self.kv_cache_spec.block_size)
        return KdaMetadata(starts, page_ids.tolist(), page_ids, fresh, decodes, exports)


class KdaBackend(AttentionBackend):
    """Names the metadata builder; the layer runs its operations itself."""

    @staticmethod
    def get_name() -> str:
        return "KIMI_K3_KDA"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("K3's KDA layer runs its recurrence itself")

    @staticmethod
    def get_builder_cls() -> type[KdaMetadataBuilder]:
        return KdaMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True
