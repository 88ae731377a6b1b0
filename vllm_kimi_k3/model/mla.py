"""The gated MLA layer: low-rank queries and keys without positions, an output gate."""

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

from vllm_kimi_k3.compat.engine import uses_vllm_mla
from vllm_kimi_k3.model.latent_cache import LatentAttention
from vllm_kimi_k3.model.projection import FusedProjection, Segment

#: The released code gives the norms inside MLA no eps, and its default is not the config's.
LOW_RANK_EPS = 1e-6


class GatedMla(nn.Module):
    """``o_proj(attention(x) * sigmoid(g_proj(x)))``, attention over latent rows.

    Args:
        text: the text config.
        dtype: of the weights.
        prefix: the module's name, ending in ".self_attn".
    """

    def __init__(self, text: PretrainedConfig, dtype: torch.dtype, prefix: str) -> None:
        super().__init__()
        size = get_tensor_model_parallel_world_size()
        self.heads = text.num_attention_heads // size
        self.nope, self.rope, self.value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
        self.rank = text.kv_lora_rank
        heads, hidden = text.num_attention_heads, text.hidden_size
        self.in_proj = FusedProjection(
            hidden,
            [
                Segment("q_a_proj", text.q_lora_rank, sliced=False),
                Segment("kv_a_proj_with_mqa", self.rank + self.rope, sliced=False),
                Segment("g_proj", heads * self.value),
            ],
            dtype,
        )
        self.q_a_layernorm = RMSNorm(text.q_lora_rank, LOW_RANK_EPS)
        self.kv_a_layernorm = RMSNorm(self.rank, LOW_RANK_EPS)
        self.q_b_proj = ColumnParallelLinear(
            text.q_lora_rank, heads * (self.nope + self.rope), bias=False, prefix=f"{prefix}.q_b_proj"
        )
        self.o_proj = RowParallelLinear(heads * self.value, hidden, bias=False, prefix=f"{prefix}.o_proj")
        wide = heads * (self.nope + self.value)
        self.attn: nn.Module
        if uses_vllm_mla(text):
            from vllm_kimi_k3.compat.attention import VllmMla

            up = ColumnParallelLinear(self.rank, wide, bias=False, prefix=f"{prefix}.kv_b_proj")
            self.kv_b_proj: nn.Module = up
            self.attn = VllmMla(text, self.heads, up, get_current_vllm_config(), f"{prefix}.attn")
            self.attend = self.attn.attend
        else:
            # Absorbed into queries and outputs below, so its rows must stay as they were loaded.
            self.kv_b_proj = FusedProjection(self.rank, [Segment("kv_b_proj", wide)], dtype)
            scale = (self.nope + self.rope) ** -0.5
            self.attn = LatentAttention(self.rank, self.rope, scale, f"{prefix}.attn")
            self.attend = self._absorbed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [T, hidden], reduced over tensor-parallel ranks."""
        q_low, kv_low, gate = self.in_proj(x).split(self.in_proj.widths, dim=-1)
        query = self.q_b_proj(self.q_a_layernorm(q_low.contiguous()))[0].view(-1, self.heads, self.nope + self.rope)
        latent = self.kv_a_layernorm(kv_low[:, : self.rank].contiguous())
        out = self.attend(query, latent, kv_low[:, self.rank :])
        return self.o_proj(out * torch.sigmoid(gate))[0]

    def _absorbed(self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor) -> torch.Tensor:
        """[T, H, nope + rope], [T, rank], [T, rope] to [T, H * value], queries and values in latent space."""
        q_nope, q_rope = query.split([self.nope, self.rope], dim=-1)
        to_key, to_value = self.kv_b_proj.weight.view(self.heads, -1, self.rank).split([self.nope, self.value], dim=1)
        absorbed = torch.einsum("thn,hnr->thr", q_nope, to_key)
        mixed = self.attn(torch.cat([absorbed, q_rope], dim=-1), latent, shared_key)
        return torch.einsum("thr,hvr->thv", mixed, to_value).flatten(1)
