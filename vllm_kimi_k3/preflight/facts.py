"""All that the rules look at."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_kimi_k3.plan import release
from vllm_kimi_k3.plan.memory import Deployment, Plan
from vllm_kimi_k3.plan.parallel import Layout
from vllm_kimi_k3.plan.release import Draft
from vllm_kimi_k3.preflight.checkpoint import Checkpoint
from vllm_kimi_k3.preflight.machine import Machine
from vllm_kimi_k3.preflight.serving import Serving

#: What vLLM takes where the option is absent.
_UTILISATION, _BATCHED_TOKENS, _SEQS = 0.92, 8192, 256


@dataclass(frozen=True)
class Facts:
    """What is to be served, on which machine, from which files.

    Attributes:
        serving: the options.
        machine: one node; all nodes are taken to be alike.
        checkpoint: the target's files; None if they were not looked at.
        draft: the speculator's files; None if there is none or they were not looked at.
    """

    serving: Serving
    machine: Machine
    checkpoint: Checkpoint | None = None
    draft: Checkpoint | None = None

    @property
    def text(self) -> Any:
        """The target's text config: that on disk, or the published one."""
        if self.checkpoint and self.checkpoint.text:
            return SimpleNamespace(**self.checkpoint.text)
        return release.TEXT

    @property
    def drafts(self) -> int:
        """Tokens that the speculator drafts; 0 without one."""
        return int(self.serving.speculative.get("num_speculative_tokens") or 0)

    @property
    def published_draft(self) -> Draft | None:
        """The published draft that is asked for, by its name on the hub or by the last part of a directory's."""
        name = str(self.serving.speculative.get("model") or "")
        if not Path(name).is_absolute():
            return release.DRAFTS.get(name)
        last = Path(name).name
        return next((draft for known, draft in release.DRAFTS.items() if known.split("/")[1] == last), None)

    @cached_property
    def plan(self) -> Plan | None:
        """The memory plan; None if the parallel sizes or dtypes do not make one, which other rules report."""
        s = self.serving
        vision: Mapping[str, Any] | None = release.VISION
        if self.checkpoint and self.checkpoint.config:
            vision = self.checkpoint.config.get("vision_config")
        gpu = self.machine.gpus[0] if self.machine.gpus else None
        if gpu is None:
            return None
        try:
            plan = Plan(
                Deployment(
                    gpu=gpu,
                    layout=Layout(s.tp, s.pp, s.dp, bool(s.get("enable_expert_parallel", False))),
                    kv_dtype="fp8" if s.fp8 and s.kv_dtype != "fp8_ds_mla" else "bf16" if not s.fp8 else s.kv_dtype,
                    draft=self.published_draft,
                    drafts=self.drafts,
                    context=context_length(s.get("max_model_len"), self.text.max_position_embeddings),
                    utilisation=float(s.get("gpu_memory_utilization", _UTILISATION)),
                    batched_tokens=int(s.get("max_num_batched_tokens", _BATCHED_TOKENS)),
                    seqs=int(s.get("max_num_seqs", _SEQS)),
                    prefix_caching=s.get("enable_prefix_caching", True) is not False,
                    state_width=2 if s.get("mamba_ssm_cache_dtype") == "bfloat16" else 4,
                    text=self.text,
                    vision=None if s.get("language_model_only", False) else vision,
                )
            )
            plan.stages  # noqa: B018  what is wrong with the sizes shows here
        except (ValueError, AttributeError, KeyError):
            return None
        return plan


def context_length(value: Any, limit: int) -> int:
    """``--max-model-len`` in tokens: a number, a number with k or K, M or m as vLLM takes it, or "auto"."""
    if value is None or str(value).lower() in ("auto", "-1"):
        return limit
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", str(value))
    if not match:
        raise ValueError(f"--max-model-len {value!r}: expected a number of tokens")
    factor = {"": 1, "k": 1000, "m": 10**6, "K": 1 << 10, "M": 1 << 20}[match[2]]
    return int(float(match[1]) * factor)
