"""What fits instead, when a deployment does not."""

from collections.abc import Iterator
from dataclasses import replace

from vllm_kimi_k3.plan.memory import Deployment, Plan


def alternatives(plan: Plan) -> list[str]:
    """Changes that would make what is asked for fit, the least costly first; empty if it fits already."""
    if plan.fits:
        return []
    found = [text for text, changed in _changes(plan) if Plan(changed).fits]
    d = plan.deployment
    if plan.longest:
        if plan.longest < d.context:
            found.append(f"--max-model-len {plan.longest}: the longest single request that fits as it is")
        elif running := plan.requests(d.context):
            found.append(f"{running} at once of {d.context} tokens instead of {d.requests}")
    if not found:
        found.append(f"nothing small helps: {d.layout} on {d.gpu.name} is too little memory for K3; take more GPUs")
    return found


def _changes(plan: Plan) -> Iterator[tuple[str, Deployment]]:
    d = plan.deployment
    for utilisation in (0.95, 0.97):
        if d.utilisation < utilisation and d.pool is None:
            yield f"--gpu-memory-utilization {utilisation}", d.replace(utilisation=utilisation)
            break
    if d.batched_tokens > 4096:
        yield "--max-num-batched-tokens 4096", d.replace(batched_tokens=4096)
    if d.kv_dtype == "bf16" and d.gpu.architecture not in ("sm90", "cpu"):
        yield "--kv-cache-dtype fp8", d.replace(kv_dtype="fp8")
    if d.state_width == 4:
        yield "--mamba-ssm-cache-dtype bfloat16", d.replace(state_width=2)
    if d.draft:
        yield "no draft", d.replace(draft=None, drafts=0)
    for factor in (2, 4):
        wider = d.layout.tp * factor
        if d.text.num_attention_heads % wider == 0 and d.text.moe_intermediate_size // 32 % wider == 0:
            tp = d.replace(layout=replace(d.layout, tp=wider))
            yield f"{d.layout.gpus * factor} GPUs as {tp.layout}", tp
        pp = d.replace(layout=replace(d.layout, pp=d.layout.pp * factor))
        yield f"{d.layout.gpus * factor} GPUs as {pp.layout}", pp
