"""The decoder: layers, and the AttnRes stream that runs through them."""

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer, make_layers
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from vllm_kimi_k3.compat.runner import patch_cpu_pipeline
from vllm_kimi_k3.model.kda import KimiDeltaAttention
from vllm_kimi_k3.model.mla import GatedMla
from vllm_kimi_k3.model.mlp import SituMlp
from vllm_kimi_k3.model.moe import LatentMoe
from vllm_kimi_k3.ops.attn_res import attn_res_norm


class ResidualMix(nn.Module):
    """The weights of one AttnRes site: a norm and a scoring direction."""

    def __init__(self, hidden: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.norm_weight = nn.Parameter(torch.empty(hidden, dtype=dtype), requires_grad=False)
        self.proj_weight = nn.Parameter(torch.empty(1, hidden, dtype=dtype), requires_grad=False)

    def forward(
        self,
        stream: torch.Tensor,
        delta: torch.Tensor | None,
        blocks: torch.Tensor,
        seen: int,
        snapshot: int | None = None,
        norm: RMSNorm | None = None,
    ) -> torch.Tensor:
        """The site's result, [T, H], normalised where a norm follows.

        Args:
            stream: [T, H]; gets ``delta`` added in place.
            delta: [T, H], the last sublayer's output, if it is not in the stream yet.
            blocks: [T, all blocks, H], of which ``seen`` are there.
            seen: see above.
            snapshot: the block that keeps this stream, if one starts here.
            norm: the RMS norm that follows.
        """
        weight, eps = (None, self.eps) if norm is None else (norm.weight, norm.variance_epsilon)
        mixer = (self.norm_weight, self.proj_weight, self.eps)
        return attn_res_norm(stream, delta, blocks, seen, snapshot, *mixer, weight, eps)


class DecoderLayer(nn.Module):
    """One layer. There is no plain residual over the depth: sublayers add to a stream that restarts every block, and
    read a mix of the stream and the snapshots taken at the block starts.

    Args:
        index: 0-based number of the layer.
        text: the text config.
        vllm_config: vLLM's.
        prefix: the module's name, ending in the number.
    """

    def __init__(self, index: int, text: PretrainedConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        hidden, eps, dtype = text.hidden_size, text.rms_norm_eps, vllm_config.model_config.dtype
        size = text.attn_res_block_size
        self.starts_block = index % size == 0
        self.block = index // size
        self.seen = -(-index // size)
        if index + 1 in text.linear_attn_config["kda_layers"]:
            self.self_attn: nn.Module = KimiDeltaAttention(text, vllm_config, f"{prefix}.self_attn")
        else:
            self.self_attn = GatedMla(text, dtype, f"{prefix}.self_attn")
        self.dense = index < text.first_k_dense_replace
        if self.dense:
            self.mlp = SituMlp(
                hidden,
                text.intermediate_size,
                text.activation_situ_beta,
                text.activation_situ_linear_beta,
                prefix=f"{prefix}.mlp",
            )
        else:
            self.block_sparse_moe = LatentMoe(text, dtype, f"{prefix}.block_sparse_moe")
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attention_res = ResidualMix(hidden, eps, dtype)
        self.mlp_res = ResidualMix(hidden, eps, dtype)

    def forward(
        self, stream: torch.Tensor, delta: torch.Tensor | None, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and what the next reader adds to it, both [T, H].

        Args:
            stream: [T, H], which this layer may change.
            delta: [T, H], pending for the stream, or None.
            blocks: [T, all blocks, H]; this layer writes its snapshot there if it starts a block.
        """
        snapshot = self.block if self.starts_block else None
        mixed = self.self_attention_res(stream, delta, blocks, self.seen, snapshot, self.input_layernorm)
        attended = self.self_attn(mixed)
        if self.starts_block:
            stream, attended = attended, None
        mixed = self.mlp_res(stream, attended, blocks, self.block + 1, norm=self.post_attention_layernorm)
        feed_forward = self.mlp if self.dense else self.block_sparse_moe
        return stream, feed_forward(mixed)


class KimiDecoder(nn.Module):
    """Embedding, this pipeline stage's layers, final mix and norm.

    Args:
        vllm_config: vLLM's.
        text: the text config.
        prefix: the module's name.
    """

    def __init__(self, vllm_config: VllmConfig, text: PretrainedConfig, prefix: str) -> None:
        super().__init__()
        self.text = text
        hidden, eps, dtype = text.hidden_size, text.rms_norm_eps, vllm_config.model_config.dtype
        if get_pp_group().is_first_rank:
            self.embed_tokens = VocabParallelEmbedding(
                text.vocab_size, hidden, params_dtype=dtype, prefix=f"{prefix}.embed_tokens"
            )
        else:
            self.embed_tokens = PPMissingLayer()
        if not get_pp_group().is_first_rank and current_platform.is_cpu():
            patch_cpu_pipeline()
        self.start, self.end, self.layers = make_layers(
            text.num_hidden_layers,
            lambda prefix: DecoderLayer(int(prefix.rsplit(".", 1)[1]), text, vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        if get_pp_group().is_last_rank:
            self.output_attn_res = ResidualMix(hidden, eps, dtype)
            self.norm = RMSNorm(hidden, eps)
        else:
            self.output_attn_res = PPMissingLayer()
            self.norm = PPMissingLayer()

    def snapshots(self, layer: int) -> int:
        """How many block snapshots exist before a layer runs."""
        return -(-layer // self.text.attn_res_block_size)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What this stage receives: the stream [T, H] and the snapshots [T, n, H]."""
        hidden = self.text.hidden_size
        return IntermediateTensors(
            {
                "hidden_states": torch.zeros(batch_size, hidden, dtype=dtype, device=device),
                "residual": torch.zeros(batch_size, self.snapshots(self.start), hidden, dtype=dtype, device=device),
            }
        )

    def forward(
        self, input_ids: torch.Tensor | None, received: IntermediateTensors | None, embeds: torch.Tensor | None
    ) -> torch.Tensor | IntermediateTensors:
        """The mixed output before the final norm, [T, H], or what the next stage receives."""
        if received is None:
            stream = self.embed_tokens(input_ids) if embeds is None else embeds
        else:
            stream = received["hidden_states"]
        blocks = stream.new_empty(stream.shape[0], self.snapshots(self.end), stream.shape[1])
        if received is not None:
            blocks[:, : self.snapshots(self.start)] = received["residual"]
        delta = None
        for layer in self.layers[self.start : self.end]:
            stream, delta = layer(stream, delta, blocks)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": stream + delta, "residual": blocks})
        return self.output_attn_res(stream, delta, blocks, blocks.shape[1])
