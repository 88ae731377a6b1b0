"""Memory, from the plan."""

from collections.abc import Callable, Iterator

from vllm_kimi_k3.plan.advice import alternatives
from vllm_kimi_k3.plan.memory import Plan, gib
from vllm_kimi_k3.plan.weights import stored_bytes
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning

_HIGHEST_UTILISATION = 0.97


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about memory; none where the plan cannot be made."""
    plan = facts.plan
    if plan is None:
        yield from _main_memory(facts)
        return
    d, tight = plan.deployment, plan.tightest
    if d.utilisation > _HIGHEST_UTILISATION:
        yield warning(
            "memory-utilisation",
            f"--gpu-memory-utilization {d.utilisation}",
            "kernels take workspaces outside what vLLM counts, 1.6 GiB and more were seen",
            f"--gpu-memory-utilization {_HIGHEST_UTILISATION} at most",
        )
    if tight.pool <= 0:
        needed = sum(tight.parts.values())
        yield _sure(Plan(d.replace(workspace=0)).tightest.pool <= 0)(
            "weights-do-not-fit",
            f"{d.layout} on {d.gpu.name}: {gib(needed)} GiB a GPU before any cache, vLLM may use {gib(plan.budget)}",
            "it would run out of memory after loading for minutes",
            "; ".join(alternatives(plan)),
        )
    elif d.context > plan.longest and str(facts.serving.get("max_model_len")).lower() not in ("auto", "-1"):
        yield _sure(d.context > Plan(d.replace(workspace=0)).longest)(
            "context-does-not-fit",
            f"--max-model-len {d.context}, and the cache holds one request of {plan.longest} tokens",
            "vLLM stops after it has loaded the weights",
            "; ".join(["--max-model-len auto", *alternatives(plan)]),
        )


def _main_memory(facts: Facts) -> Iterator[Finding]:
    """Without a GPU: whether the weights fit into this machine at all."""
    memory = facts.machine.memory
    if facts.machine.gpus or memory is None:
        return
    needed = stored_bytes(facts.text, None)
    if needed > memory:
        yield error(
            "weights-do-not-fit",
            f"no GPU was found, and {gib(memory)} GiB of main memory",
            f"the text model's weights take {gib(needed)} GiB",
            "run this on the machine with the GPUs, or check for one with --gpu b300 --count 8",
        )


def _sure(certain: bool) -> Callable[[str, str, str, str], Finding]:
    """An error only where no estimate is involved."""
    return error if certain else warning
