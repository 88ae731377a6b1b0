"""The engine's registries of models and configs, and what it derives from a K3 config."""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_kimi_k3.compat.version import load

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_kimi_k3")


def register_models(models: Mapping[str, str]) -> None:
    """Override vLLM's model classes; re-registering a name that is there logs a warning in vLLM, so drop it first."""
    from vllm import ModelRegistry

    for architecture, target in models.items():
        ModelRegistry.models.pop(architecture, None)
        ModelRegistry.register_model(architecture, target)


def register_configs(configs: Mapping[str, str]) -> None:
    """Replace vLLM's config classes. It looks them up in a private dict that accepts classes."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for model_type, target in configs.items():
        _CONFIG_REGISTRY[model_type] = load(target)


def register_config_hooks(architectures: Iterable[str]) -> None:
    """Install the hook that vLLM calls on a K3 ``ModelConfig``, and the facts it derives from the config.

    vLLM has no functions for this, only two dicts: one from architecture to hook class, one from model type to the
    class that derives what the engine wants to know (MLA or not, head size).
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    class KimiK3Hook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: "ModelConfig") -> None:
            from vllm_kimi_k3.config import check_config

            check_config(model_config.hf_text_config)
            switch_images_off(model_config)

        @classmethod
        def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
            from vllm_kimi_k3.config import check_parallel, check_speculation
            from vllm_kimi_k3.preflight.engine import preflight
            from vllm_kimi_k3.settings import settings

            parallel = vllm_config.parallel_config
            check_parallel(vllm_config.model_config.hf_text_config, parallel.tensor_parallel_size)
            check_speculation(getattr(vllm_config.speculative_config, "method", None))
            if settings().preflight:
                preflight(vllm_config)
            # Our grammars cover the thinking; vLLM would let them begin only after it, and never if it is not closed.
            vllm_config.structured_outputs_config.enable_in_reasoning = True
            set_hash_unit(vllm_config)

    class KimiK3Convertor(ModelArchConfigConvertorBase):
        def is_deepseek_mla(self) -> bool:
            return uses_vllm_mla(self.hf_text_config)

        def get_head_size(self) -> int:
            text = self.hf_text_config
            return text.kv_lora_rank + text.qk_rope_head_dim

        def get_total_num_kv_heads(self) -> int:
            return 1

    for architecture in architectures:
        MODELS_CONFIG_MAP[architecture] = KimiK3Hook
    for model_type in ("kimi_k3", "kimi_linear"):
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = KimiK3Convertor


def uses_vllm_mla(text: Any) -> bool:
    """Whether MLA layers are vLLM's own: where the setting `operations` has "latent_attention=vllm", on a GPU, with
    K3's row of 512 + 64 values, which its kernels are built for.

    On CPU they are not: its platform turns chunked prefill and prefix caching off for every model that says it uses
    MLA, and its kernel takes pages of 16 tokens only.

    Args:
        text: the text config.
    """
    from vllm.platforms import current_platform

    from vllm_kimi_k3.settings import settings

    wanted = settings().wanted_operations.get("latent_attention") == "vllm"
    built = (text.kv_lora_rank, text.qk_rope_head_dim) == (512, 64)
    return wanted and built and current_platform.is_cuda_alike()


def switch_images_off(model_config: "ModelConfig") -> None:
    """Serve a checkpoint without a vision tower as ``--language-model-only`` does: images then get a clear refusal.

    Only files on this machine are looked at; a model that is yet to be downloaded has what its config says.
    """
    from pathlib import Path

    from vllm_kimi_k3.model.shards import has_vision

    images, directory = model_config.multimodal_config, Path(model_config.model)
    if images is None or images.language_model_only:
        return
    config = getattr(model_config.hf_config, "vision_config", None)
    if not getattr(config, "vt_hidden_size", None) or (directory.is_dir() and not has_vision(directory)):
        logger.warning("the checkpoint has no vision tower: requests with images are refused")
        images.language_model_only = True


def set_hash_unit(vllm_config: "VllmConfig") -> None:
    """Where prefix caching is on, have vLLM hash prompts as finely as our cache finds them.

    Raises:
        ValueError: the settings' unit is neither 64 nor 128.
    """
    from vllm_kimi_k3.cache.unit import HASH_UNITS, hash_block
    from vllm_kimi_k3.settings import settings

    unit, cache = settings().hash_unit, vllm_config.cache_config
    if unit not in HASH_UNITS:
        raise ValueError(f"VLLM_KIMI_K3_HASH_UNIT={unit}: the hash unit of the prefix cache is 128 or 64 tokens")
    if not cache.enable_prefix_caching:
        return
    if cache.prefix_match_unit not in (None, unit, hash_block(unit)):
        logger.warning(
            "--prefix-match-unit %s has no effect on K3: set VLLM_KIMI_K3_HASH_UNIT (now %s) instead",
            cache.prefix_match_unit,
            unit,
        )
    cache.prefix_match_unit = hash_block(unit)
    # The worker counts NaN logits a request; cache/guard.py acts on them.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")
