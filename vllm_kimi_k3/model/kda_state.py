"""The state of a KDA layer as vLLM holds it: pages, their shapes, and where a batch's sequences lie in them."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator, MambaStateShapeCalculator
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_kimi_k3.cache.exports import step_exports
from vllm_kimi_k3.compat.graphs import decode_graphs
from vllm_kimi_k3.ops.kda_step import kda_decode_step


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
class Prefills:
    """The sequences of a batch that are no decodes, as the prefill operations take them.

    Attributes:
        starts: N + 1 token offsets, counted from the first of these sequences' tokens.
        pages: N pages of their states.
        fresh: N flags: the sequence begins in this batch.
        exports: (sequence, tokens, page): states to keep after that many of a sequence's tokens.
    """

    starts: list[int]
    pages: list[int]
    fresh: list[bool]
    exports: list[tuple[int, int, int]]

    @property
    def where(self) -> tuple[list[int], list[int], list[bool], list[tuple[int, int, int]]]:
        """The last arguments of the prefill operations."""
        return self.starts, self.pages, self.fresh, self.exports


@dataclass
class KdaMetadata(AttentionMetadata):
    """Where the sequences of a batch lie. The first ``decodes`` sequences have one token and a state already.

    Attributes:
        decodes: how many leading sequences are decodes.
        page_ids: [decodes] int32, pages of their states; -1 for a padded row.
        prefills: the other sequences, None if there are none.
    """

    decodes: int
    page_ids: torch.Tensor
    prefills: Prefills | None


class KdaMetadataBuilder(AttentionMetadataBuilder[KdaMetadata]):
    """Builds :class:`KdaMetadata` for all layers of one cache group."""

    reorder_batch_threshold = 1
    kv_cache_spec: MambaSpec

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mode = vllm_config.cache_config.mamba_cache_mode
        # Graphs of decode steps read it at this address.
        self.page_ids = torch.full((vllm_config.scheduler_config.max_num_seqs,), -1, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        return decode_graphs(kda_decode_step.has_kernel(torch.device(vllm_config.device_config.device_type)))

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KdaMetadata:
        """As vLLM's interface says; ``common_prefix_len`` and ``fast_build`` change nothing here."""
        common = common_attn_metadata
        page_ids = self._running_pages(common)
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        new = [stop - start for start, stop in itertools.pairwise(starts)]
        lengths = host_lengths(common)
        decodes = 0
        while decodes < len(new) and new[decodes] == 1 and lengths[decodes] > 1:
            decodes += 1
        # The rows that pad a batch to the size of a graph have no tokens.
        last = len(new)
        while last > decodes and new[last - 1] == 0:
            last -= 1
        prefills = None
        if decodes < last:
            exports = []
            if self.mode == "align":
                rows = common.block_table_tensor[decodes:last].tolist()
                unit = self.kv_cache_spec.block_size
                exports = step_exports(rows, lengths[decodes:last], new[decodes:last], unit)
            prefills = Prefills(
                starts=[start - starts[decodes] for start in starts[decodes : last + 1]],
                pages=page_ids[decodes:last].tolist(),
                fresh=[new[i] == lengths[i] for i in range(decodes, last)],
                exports=exports,
            )
        return KdaMetadata(decodes, page_ids[:decodes], prefills)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> KdaMetadata:
        """A decode step of as many rows as the graph has."""
        page_ids = self._running_pages(common_attn_metadata)
        return KdaMetadata(len(page_ids), page_ids, None)

    def _running_pages(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """[N] int32: pages of the running states, in the buffer that graphs read; -1 for rows without a sequence."""
        table, lengths = common.block_table_tensor[: common.num_reqs], common.seq_lens[: common.num_reqs]
        if self.mode == "align":
            column = ((lengths - 1) // self.kv_cache_spec.block_size).clamp(min=0).long()
            pages = table.gather(1, column.unsqueeze(1)).squeeze(1)
        else:
            pages = table[:, 0]
        mine = self.page_ids[: common.num_reqs]
        return mine.copy_(pages).masked_fill_(lengths <= 0, -1)


def host_lengths(common: CommonAttentionMetadata) -> list[int]:
    """Lengths of the batch's sequences, the batch's tokens included; 0 for padded rows.

    On a GPU they are the runner's own count, so that nobody waits for the device. Drafts that will be refused are in
    it, but a sequence with drafts is no prefill, and of decodes only whether they have a state matters.
    """
    bound = common.seq_lens_cpu_upper_bound
    known = common.seq_lens if bound is None or common.seq_lens.device.type == "cpu" else bound
    lengths: list[int] = known[: common.num_reqs].tolist()
    return lengths + [0] * (common.num_reqs - len(lengths))


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
