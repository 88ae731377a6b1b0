"""Parallel sizes."""

from collections.abc import Iterator

from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about the layout."""
    serving, text = facts.serving, facts.text
    heads, groups = text.num_attention_heads, text.moe_intermediate_size // 32
    if heads % serving.tp or groups % serving.tp or text.intermediate_size % serving.tp:
        sizes = [n for n in range(1, heads + 1) if not (heads % n or groups % n or text.intermediate_size % n)]
        yield error(
            "tensor-parallel-size",
            f"--tensor-parallel-size {serving.tp}",
            f"it does not divide {heads} heads, {text.intermediate_size} inner rows and {groups} groups of an expert",
            f"one of {', '.join(map(str, sizes))}",
        )
    ranks = serving.tp * serving.dp
    if serving.get("enable_expert_parallel", False) and text.num_experts % ranks:
        yield error(
            "expert-parallel-size",
            f"--enable-expert-parallel over {ranks} ranks",
            f"{text.num_experts} experts do not divide by {ranks}",
            "tensor- and data-parallel sizes whose product divides it",
        )
    if serving.get("enable_expert_parallel", False):
        yield warning(
            "expert-parallel",
            "--enable-expert-parallel",
            "this version slices each expert over the tensor-parallel ranks, so every replica holds all of them",
            "a larger --tensor-parallel-size, or VLLM_KIMI_K3_DISABLE=1 for vLLM's own K3",
        )
    if serving.size("prefill_context_parallel_size") > 1:
        yield error(
            "prefill-context-parallel",
            f"--prefill-context-parallel-size {serving.get('prefill_context_parallel_size')}",
            "a KDA state runs through the whole prompt; no rank can start in its middle",
            "leave it out",
        )
    partition = serving.environ.get("VLLM_PP_LAYER_PARTITION")
    if partition:
        parts = [int(part) for part in partition.split(",") if part.strip().isdigit()]
        if sum(parts) != text.num_hidden_layers or len(parts) != serving.pp:
            yield error(
                "layer-partition",
                f"VLLM_PP_LAYER_PARTITION={partition} with --pipeline-parallel-size {serving.pp}",
                f"its {len(parts)} parts add up to {sum(parts)}, the model has {text.num_hidden_layers} layers",
                f"{serving.pp} numbers that add up to {text.num_hidden_layers}, or unset it",
            )
