"""Patches of vLLM's model runners."""

from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.compat.patch import wrap


def patch_cpu_pipeline() -> None:
    """0.32: a later pipeline stage on CPU allocates what it receives into. vLLM does so in a run that eager mode skips.

    The decoder calls this in a worker whose stage is not the first.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def make(initialize: Callable[..., None]) -> Callable[..., None]:
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **kwargs)
            if self.intermediate_tensors is None:
                self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                    batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
                )

        return initialize_kv_cache

    wrap(CPUModelRunner, "initialize_kv_cache", ("self", "kv_cache_config"), make)
