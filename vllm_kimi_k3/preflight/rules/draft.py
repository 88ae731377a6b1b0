"""Speculation: the draft's contract with the target, and what runs it."""

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_kimi_k3.dspark.contract import misfits
from vllm_kimi_k3.plan.release import DRAFTS
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning

#: MLA kernels that attend from a block to all of itself, which the draft of MLA layers needs.
_BLOCK_ATTENTION = {
    "sm90": ("TRITON_MLA",),
    "sm100": ("FLASHINFER_MLA", "TOKENSPEED_MLA", "TRITON_MLA"),
    "sm103": ("FLASHINFER_MLA", "TOKENSPEED_MLA", "TRITON_MLA"),
    "sm120": ("TRITON_MLA",),
    "gfx942": ("TRITON_MLA",),
    "gfx950": ("ROCM_AITER_MLA", "TRITON_MLA"),
}
_SERVED = [name for name, draft in DRAFTS.items() if draft.served]


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about speculation; none without it."""
    config = facts.serving.speculative
    if not config:
        return
    method = config.get("method")
    if method != "dspark":
        yield error(
            "draft-method",
            f"speculative method {method!r}",
            "K3's release has no draft layers of its own; its drafts are DSpark",
            '"method": "dspark"',
        )
        return
    yield from _tokens(facts)
    yield from _sampling(config)
    yield from _backend(facts)
    if facts.serving.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        yield error(
            "draft-runner",
            "VLLM_USE_V2_MODEL_RUNNER=0 with a DSpark draft",
            "vLLM's first model runner has no DSpark",
            "unset it",
        )
    if facts.draft and facts.draft.config:
        yield from _contract(facts, facts.draft.config)
    elif facts.draft and facts.draft.problems:
        for file, problem in facts.draft.problems.items():
            yield error(
                "draft-files",
                f"{facts.draft.name}/{file}: {problem}",
                "the draft cannot be loaded",
                "download it again",
            )


def _tokens(facts: Facts) -> Iterator[Finding]:
    published = facts.published_draft
    if published and not published.served:
        yield error(
            "draft-unsupported",
            f"draft {published.name}",
            "its mask token and layer taps are not those that vLLM's dspark method reads; acceptance would be zero",
            f"one of {', '.join(_SERVED)}",
        )
        return
    right = published.tokens if published else None
    if not facts.drafts:
        yield error(
            "draft-tokens",
            "num_speculative_tokens is not given",
            "the draft's config does not state it",
            f'"num_speculative_tokens": {right or 7}',
        )
    elif right and facts.drafts > right and not (facts.draft and facts.draft.config):
        yield error(
            "draft-tokens",
            f"num_speculative_tokens {facts.drafts}",
            f"the draft was trained for blocks of {right}; what it says about later positions is noise",
            f'"num_speculative_tokens": {right}',
        )


def _sampling(config: Mapping[str, Any]) -> Iterator[Finding]:
    rejection, draft = config.get("rejection_sample_method"), config.get("draft_sample_method")
    if rejection == "block" and draft != "probabilistic":
        yield warning(
            "draft-sampling",
            f"rejection_sample_method block with draft_sample_method {draft or 'greedy'}",
            "block verification gains only with the draft's probabilities",
            '"draft_sample_method": "probabilistic"',
        )
    if rejection == "synthetic":
        yield warning(
            "synthetic-acceptance",
            "rejection_sample_method synthetic",
            "drafts are accepted at a set rate whatever they are: the output is wrong, good for benchmarks only",
            '"rejection_sample_method": "block"',
        )


def _backend(facts: Facts) -> Iterator[Finding]:
    config, published = facts.serving.speculative, facts.published_draft
    backend = config.get("attention_backend")
    allowed = _BLOCK_ATTENTION.get(facts.machine.architecture)
    if published and published.mla_layers and allowed:
        if backend and str(backend).upper() not in allowed:
            yield error(
                "draft-backend",
                f"draft attention_backend {backend} on {facts.machine.architecture}",
                "it cannot attend from a block to all of itself there",
                f'"attention_backend": "{allowed[0]}"',
            )
        elif not backend and facts.machine.architecture in ("sm90", "gfx942"):
            yield error(
                "draft-backend",
                f"the draft has no attention_backend on {facts.machine.architecture}",
                "the target's backend cannot attend from a block to all of itself",
                f'"attention_backend": "{allowed[0]}"',
            )
    if config.get("enable_adaptive_verification") and facts.serving.pp > 1:
        yield error(
            "adaptive-verification",
            "enable_adaptive_verification with pipeline parallelism",
            "vLLM cannot change a step's width across stages",
            "leave it out",
        )


def _contract(facts: Facts, config: Mapping[str, Any]) -> Iterator[Finding]:
    """The draft's own config against the target's."""
    why = "the draft was made for another target, or for another engine: no draft would be accepted"
    for misfit in misfits(config, facts.text, facts.drafts or None):
        what = f"draft config {misfit.field} is {misfit.value!r}"
        yield error("draft-contract", what, why, f"a draft with {misfit.field} {misfit.expected}")
