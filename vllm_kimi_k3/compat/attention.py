"""vLLM's own MLA layer, with our cache behind it."""

from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_kimi_k3.cache.spec import row_spec


class VllmMla(MLAAttention):
    """0.33, GPU: attention by the MLA backend that vLLM picks; rows are found by our hash unit.

    Args:
        text: the text config.
        heads: of this rank.
        kv_b_proj: rank to each head's key and value; the layer absorbs it after loading.
        vllm_config: vLLM's.
        prefix: the layer's name in vLLM's forward context.
    """

    def __init__(
        self,
        text: PretrainedConfig,
        heads: int,
        kv_b_proj: ColumnParallelLinear,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__(
            num_heads=heads,
            scale=(text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5,
            qk_nope_head_dim=text.qk_nope_head_dim,
            qk_rope_head_dim=text.qk_rope_head_dim,
            v_head_dim=text.v_head_dim,
            q_lora_rank=text.q_lora_rank,
            kv_lora_rank=text.kv_lora_rank,
            kv_b_proj=kv_b_proj,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
        )

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        spec: Any = super().get_kv_cache_spec(vllm_config)
        return row_spec(spec, vllm_config)

    def attend(self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor) -> torch.Tensor:
        """Cache this batch's rows, then attend.

        Args:
            query: [T, H, nope + rope].
            latent: [T, rank], normalised.
            shared_key: [T, rope].

        Returns:
            [T, H * value].
        """
        shape = torch.Size((query.shape[0], self.num_heads * self.v_head_dim))
        out: torch.Tensor = self(query, latent, shared_key.unsqueeze(1), output_shape=shape)
        return out
