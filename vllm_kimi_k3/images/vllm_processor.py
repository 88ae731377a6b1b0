"""The image processor in vLLM's terms: patches for the engine, and as many pads in the prompt."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from transformers.feature_extraction_utils import BatchFeature
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ImageProcessorItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
    InputProcessingContext,
    PromptReplacement,
    PromptUpdate,
)

from vllm_kimi_k3.images.patches import image_patches
from vllm_kimi_k3.images.rules import ImageRules


class _ImageParser(MultiModalDataParser):
    """Takes images as they are: vLLM's own puts white behind transparent ones."""

    def _parse_image_data(self, data: Any) -> Any:
        if data is None or self.is_embeddings(data):
            return super()._parse_image_data(data)
        return ImageProcessorItems(list(data) if isinstance(data, (list, tuple)) else [data])


class KimiK3ProcessingInfo(BaseProcessingInfo):
    """What vLLM asks about K3's images before it has any.

    Args:
        ctx: vLLM's.
    """

    def __init__(self, ctx: InputProcessingContext) -> None:
        super().__init__(ctx)
        self.rules = ImageRules.from_config(ctx.get_hf_image_processor_config())

    @property
    def pad(self) -> int:
        """The token whose places take an image's embeddings."""
        return int(self.get_hf_config().media_placeholder_token_id)

    def get_data_parser(self) -> MultiModalDataParser:
        return _ImageParser(expected_hidden_size=self._get_expected_hidden_size())

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"image": self.rules.fit(*self.rules.largest(seq_len)).tokens}


class KimiK3DummyInputs(BaseDummyInputsBuilder[KimiK3ProcessingInfo]):
    """The largest image that fits a prompt, for memory profiling."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        # Not used: special tokens have no text here, see `KimiK3Processor.get_dummy_inputs`.
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        width, height = self.info.rules.largest(seq_len)
        count, options = mm_counts.get("image", 0), mm_options.get("image")
        return {"image": self._get_dummy_images(width=width, height=height, num_images=count, overrides=options)}


class KimiK3Processor(BaseMultiModalProcessor[KimiK3ProcessingInfo]):
    """Images to patches; each pad that the renderer wrote to as many as the image takes."""

    requires_tokenizer: ClassVar[bool] = False

    def get_dummy_inputs(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        inputs = super().get_dummy_inputs(seq_len, mm_counts, mm_options)
        inputs.prompt = [self.info.pad] * mm_counts.get("image", 0)
        return inputs

    def _call_hf_processor(self, hf_data: Mapping[str, object], hf_kwargs: Mapping[str, object]) -> BatchFeature:
        if hf_kwargs:
            raise VLLMValidationError(
                f"mm_processor_kwargs: {dict(hf_kwargs)!r}: K3's image processor has no options; leave this out",
                parameter="mm_processor_kwargs",
            )
        images = hf_data["images"]
        assert isinstance(images, Sequence)
        made = [image_patches(_pixels(image), self.info.rules) for image in images]
        patches = torch.cat([torch.from_numpy(patches) for patches, _ in made])
        grids = torch.tensor([[fit.rows, fit.columns] for _, fit in made])
        return BatchFeature({"pixel_values": patches, "grids": grids})

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        grids = hf_inputs.get("grids", torch.empty((0, 2), dtype=torch.int64))
        return {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "grids": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, object], out_mm_kwargs: Any
    ) -> Sequence[PromptUpdate]:
        pad = self.info.pad

        def pads(item: int) -> list[int]:
            size = mm_items.get_items("image", ImageProcessorItems).get_image_size(item)
            return [pad] * self.info.rules.fit(size.width, size.height).tokens

        return [PromptReplacement(modality="image", target=[pad], replacement=pads)]

    def _apply_prompt_updates_via_text(self, token_ids: list[int], *rest: Any, **kwargs: Any) -> Any:
        # vLLM's way out where a pad is missing is to decode the prompt and encode it anew, which would turn what a
        # user wrote into control tokens.
        raise VLLMValidationError(
            f"the prompt has {token_ids.count(self.info.pad)} <|media_pad|> tokens, fewer than there are images",
            parameter="prompt",
        )


def _pixels(image: object) -> Image.Image:
    return image if isinstance(image, Image.Image) else Image.fromarray(image)  # type: ignore[arg-type]
