"""What vLLM's registry is told about K3's two kinds of cache.

Importing this module registers the specs with their managers. The workers' layers import it, and so does the
scheduler's process when it unpickles what they report; no process that serves another model does.
"""

from dataclasses import dataclass, fields

from vllm.config import VllmConfig
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from vllm_kimi_k3.cache.latent import LatentManager
from vllm_kimi_k3.cache.manager import KdaManager
from vllm_kimi_k3.cache.unit import hash_unit

# vLLM registers its own specs only while the registry is empty.
register_all_kvcache_specs(None)


@register_kv_cache_spec(manager_class=KdaManager, uniform_type_base_spec=MambaSpec)
@dataclass(frozen=True)
class KdaStateSpec(MambaSpec):
    """A KDA layer's state.

    ``block_size`` is the hash unit, not the page of MLA rows: a request's block table has a column for each unit, so a
    state at any unit's end has a column of its own. Bytes of a page do not depend on it.
    """


@register_kv_cache_spec(manager_class=LatentManager, uniform_type_base_spec=FullAttentionSpec)
@dataclass(frozen=True, kw_only=True)
class LatentRowSpec(MLAAttentionSpec):
    """An MLA layer's rows, found by unit."""


def state_spec(spec: KVCacheSpec, vllm_config: VllmConfig) -> KVCacheSpec:
    """The spec that a KDA layer gives vLLM, from the one it would give without this cache.

    It is the same one unless prefix caching is on. vLLM's second model runner reads the size of a state's block from
    the cache config, so that is set too.
    """
    cache = vllm_config.cache_config
    if not isinstance(spec, MambaSpec) or spec.mamba_cache_mode != "align" or cache.prefix_match_unit is None:
        return spec
    cache.mamba_block_size = hash_unit(cache.prefix_match_unit)
    return KdaStateSpec(**_fields(spec) | {"block_size": cache.mamba_block_size})


def row_spec(spec: MLAAttentionSpec, vllm_config: VllmConfig) -> MLAAttentionSpec:
    """The spec that an MLA layer gives vLLM, from the one it would give without this cache."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return spec
    return LatentRowSpec(**_fields(spec))


def _fields(spec: KVCacheSpec) -> dict[str, object]:
    return {field.name: getattr(spec, field.name) for field in fields(spec)}
