"""The model classes that vLLM creates: the text model, and the whole of K3 around it."""

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, MambaStateCopyFuncCalculator
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsMultiModal, SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.sequence import IntermediateTensors

from vllm_kimi_k3.images.vllm_processor import KimiK3DummyInputs, KimiK3ProcessingInfo, KimiK3Processor
from vllm_kimi_k3.model.decoder import KimiDecoder
from vllm_kimi_k3.model.kda_state import state_dtypes, state_shapes
from vllm_kimi_k3.model.loading import load_weights
from vllm_kimi_k3.model.vision import Grid, Projector, VisionTower
from vllm_kimi_k3.model.vision_share import embed_images
from vllm_kimi_k3.model.weights import VISION


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
        return load_weights(dict(self.named_parameters()), self.layers, self.vllm_config, weights)

    @property
    def layers(self) -> range:
        """Those of this pipeline stage."""
        return range(self.model.start, self.model.end)


@MULTIMODAL_REGISTRY.register_processor(KimiK3Processor, info=KimiK3ProcessingInfo, dummy_inputs=KimiK3DummyInputs)
class KimiK3ForConditionalGeneration(_HybridState, nn.Module, SupportsMultiModal, HasInnerState, SupportsPP, IsHybrid):
    """K3: the text model under the published prefix ``language_model``, and the vision tower with its projector.

    The tower is there where images are embedded, on the first pipeline stage, unless images are switched off or the
    checkpoint has none.
    """

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    supports_encoder_tp_data: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        model_config = vllm_config.model_config
        self.sees = get_pp_group().is_first_rank and model_config.multimodal_config.get_limit_per_prompt("image") > 0
        if self.sees:
            vision = model_config.hf_config.vision_config
            self.vision_tower = VisionTower(vision, maybe_prefix(prefix, "vision_tower"))
            self.mm_projector = Projector(vision)
        self.language_model = KimiLinearForCausalLM(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "language_model")
        )
        self.make_empty_intermediate_tensors = self.language_model.make_empty_intermediate_tensors

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        """[tokens, H] of each image, from ``pixel_values`` uint8 [L, 3, 14, 14] and ``grids`` [images, 2]."""
        grids = [Grid(*grid) for grid in kwargs["grids"].tolist()]
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        gather = (lambda x: tensor_model_parallel_all_gather(x, dim=0)) if ranks > 1 else None
        return embed_images(self.vision_tower, self.mm_projector, kwargs["pixel_values"], grids, rank, ranks, gather)

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
        parameters = dict(self.language_model.named_parameters())
        vision = None
        if self.sees:
            vision = self.vllm_config.model_config.hf_config.vision_config.to_dict()
            for name in ("vision_tower", "mm_projector"):
                parameters |= {f"{name}.{tail}": value for tail, value in getattr(self, name).named_parameters()}
        filled = load_weights(parameters, self.language_model.layers, self.vllm_config, weights, vision)
        return {name if name.startswith(VISION) else f"language_model.{name}" for name in filled}
