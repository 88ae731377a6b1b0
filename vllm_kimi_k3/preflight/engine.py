"""Preflight inside ``vllm serve``: from vLLM's own config, once, before anything is loaded."""

import logging
import os
from typing import Any

from vllm_kimi_k3.preflight.checkpoint import Checkpoint
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.inspection import findings
from vllm_kimi_k3.preflight.machine import Machine, probe
from vllm_kimi_k3.preflight.serving import Serving

logger = logging.getLogger("vllm.vllm_kimi_k3.preflight")
_seen: set[int] = set()


class PreflightError(ValueError):
    """The deployment cannot work; the message has every error with its fix."""


def options_of(vllm_config: Any) -> dict[str, Any]:
    """The options behind a ``VllmConfig``, by the names of ``vllm serve``."""
    c = vllm_config
    cache, parallel, scheduler, model = c.cache_config, c.parallel_config, c.scheduler_config, c.model_config
    attention, speculative, transfer = c.attention_config, c.speculative_config, c.kv_transfer_config
    backend = getattr(attention, "backend", None)
    return {
        "model": model.model,
        "max_model_len": "auto" if model.original_max_model_len == -1 else model.max_model_len,
        "tokenizer_mode": model.tokenizer_mode,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "nnodes": parallel.nnodes,
        "disable_custom_all_reduce": parallel.disable_custom_all_reduce,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "mamba_ssm_cache_dtype": cache.mamba_ssm_cache_dtype,
        "mamba_cache_dtype": cache.mamba_cache_dtype,
        "prefix_match_unit": cache.prefix_match_unit,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "use_replayssm": cache.use_replayssm,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "disable_hybrid_kv_cache_manager": scheduler.disable_hybrid_kv_cache_manager,
        "attention_config": {
            "backend": getattr(backend, "name", backend),
            "use_prefill_query_quantization": getattr(attention, "use_prefill_query_quantization", None),
            "mla_prefill_backend": getattr(attention, "mla_prefill_backend", None),
        },
        "load_format": c.load_config.load_format,
        "speculative_config": speculative
        and {
            "method": speculative.method,
            "model": speculative.model,
            "num_speculative_tokens": speculative.num_speculative_tokens,
            "attention_backend": getattr(speculative.attention_backend, "name", speculative.attention_backend),
            "draft_sample_method": speculative.draft_sample_method,
            "rejection_sample_method": speculative.rejection_sample_method,
        },
        "kv_transfer_config": transfer
        and {
            "kv_connector": transfer.kv_connector,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        },
    }


def preflight(vllm_config: Any, machine: Machine | None = None) -> None:
    """Log the warnings about a deployment and stop on its errors.

    Files are left to the loader, which checks every header before it copies a byte. vLLM makes its config more than
    once; the same deployment is looked at once a process.

    Args:
        vllm_config: vLLM's.
        machine: the node; this one if None.

    Raises:
        PreflightError: there are errors.
    """
    options = options_of(vllm_config)
    key = hash(repr(sorted(options.items(), key=lambda item: item[0])))
    if key in _seen:
        return
    serving = Serving(options, dict(os.environ), frontend=False)
    config = {"text_config": vllm_config.model_config.hf_text_config.to_dict(), "model_type": "kimi_k3"}
    vision = getattr(vllm_config.model_config.hf_config, "vision_config", None)
    if vision is not None:
        config["vision_config"] = vision.to_dict()
    model = Checkpoint(str(options["model"]), config=config)
    facts = Facts(serving, machine or probe(), model)
    found = findings(facts)
    errors = [finding for finding in found if finding.level == "error"]
    for finding in found:
        if finding.level == "warning":
            logger.warning("preflight: %s", finding)
    if errors:
        listing = "\n".join(map(str, errors))
        raise PreflightError(
            f"preflight found {len(errors)} errors; VLLM_KIMI_K3_PREFLIGHT=0 serves regardless\n{listing}"
        )
    _seen.add(key)
