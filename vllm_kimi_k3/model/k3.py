"""The model classes that vLLM creates: the text model, and the whole of K3 around it."""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_kimi_k3.model.decoder import KimiDecoder
from vllm_kimi_k3.model.kda_state import state_dtypes, state_shapes
from vllm_kimi_k3.model.loading import load_weights


class _HybridState:
    """What vLLM asks a hybrid model's class about its recurrent state, before any layer exists."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return state_shapes(vllm_config.model_config.hf_text_config, vllm_config)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return state_dtypes(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        return MambaStateCopyFuncCalculator.kda_state_copy_func()


class KimiLinearForCausalLM(_HybridState, nn.Module, HasInnerState, SupportsPP, IsHybrid):
    """K3's text model with its head; the architecture of a text-only checkpoint."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        text = vllm_config.model_config.hf_text_config
        self.model = KimiDecoder(vllm_config, text, maybe_prefix(prefix, "model"))
        if get_pp_group().is_last_rank:
            self.lm_head = ParallelLMHead(
                text.vocab_size,
                text.hidden_size,
                params_dtype=vllm_config.model_config.dtype,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
        else:
            self.lm_head = PPMissingLayer()
        self.logits_processor = LogitsProcessor(text.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, H]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """[T] ids to the output before the final norm, [T, H]; positions carry nothing, K3 has no rotary."""
        return self.model(input_ids, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[T, H] to [T, vocabulary]; the final norm stands here so that drafts see the output before it."""
        return self.logits_processor(self.lm_head, self.model.norm(hidden_states))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters of this rank and stage from published tensors."""
        return load_weights(self, range(self.model.start, self.model.end), self.vllm_config, weights)


class KimiK3ForConditionalGeneration(_HybridState, nn.Module, HasInnerState, SupportsPP, IsHybrid):
    """K3: the text model under the published prefix ``language_model``."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.language_model = KimiLinearForCausalLM(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model")
        )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids to [T, H]."""
        return self.language_model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor | IntermediateTensors:
        """As the text model's."""
        return self.language_model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """As the text model's."""
        return self.language_model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the parameters of this rank and stage from published tensors."""
        return {f"language_model.{name}" for name in self.language_model.load_weights(weights)}
