"""A plan as text, as JSON, and as bars."""

from typing import Any

from vllm_kimi_k3.plan.advice import alternatives
from vllm_kimi_k3.plan.gpus import GIB
from vllm_kimi_k3.plan.memory import Plan, Stage, gib

_BAR = 48
_MIB = 1 << 20
_CONTEXTS = (8192, 32768, 131072, 262144, 524288, 1048576)


def contexts(plan: Plan) -> list[int]:
    """Context lengths for a table of how many requests fit."""
    limit = plan.deployment.text.max_position_embeddings
    return sorted({c for c in (*_CONTEXTS, plan.deployment.context) if c <= limit})


def segments(plan: Plan, stage: Stage) -> list[tuple[str, int]]:
    """What a GPU's memory is divided into: weights, the rest by part, the cache, what vLLM leaves alone."""
    weights = sum(size for name, size in stage.parts.items() if name.startswith("weights"))
    rest = [(name, size) for name, size in stage.parts.items() if not name.startswith("weights")]
    left = plan.deployment.gpu.memory - sum(stage.parts.values()) - max(stage.pool, 0)
    return [("weights", weights), *rest, ("cache", max(stage.pool, 0)), ("left alone", max(left, 0))]


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that the text says, sizes in bytes."""
    d, tight = plan.deployment, plan.tightest
    p = tight.pages
    return {
        "gpu": {"name": d.gpu.name, "memory": d.gpu.memory, "count": d.layout.gpus},
        "layout": {"tp": d.layout.tp, "pp": d.layout.pp, "dp": d.layout.dp, "ep": d.layout.ep},
        "kv_dtype": d.kv_dtype,
        "draft": d.draft and {"name": d.draft.name, "tokens": d.drafts},
        "budget": plan.budget,
        "stages": [
            {"layers": [s.layers.start, s.layers.stop], "parts": s.parts, "pool": s.pool, "blocks": s.blocks}
            for s in plan.stages
        ],
        "pages": {
            "block_tokens": p.block,
            "page_bytes": p.page,
            "state_bytes": p.state,
            "padding": round(p.padding, 6),
            "groups": {"mla": p.mla_groups, "kda": p.kda_groups, "draft": p.window_groups},
            "layers_a_group": p.group,
            "absent_layers": p.absent_layers,
            "block_bytes": p.block_bytes,
            "state_block_bytes": p.state_block_bytes,
            "blocks": plan.blocks,
        },
        "usage": plan.usage,
        "context": d.context,
        "requests": d.requests,
        "longest_context": plan.longest,
        "requests_at": {str(c): plan.requests(c) for c in contexts(plan)},
        "fits": plan.fits,
        "instead": alternatives(plan),
    }


def as_text(plan: Plan) -> str:
    """A report for a terminal."""
    d = plan.deployment
    draft = f", draft {d.draft.name} ({d.drafts} tokens)" if d.draft else ""
    lines = [
        f"{d.layout.gpus} x {d.gpu.name} ({gib(d.gpu.memory)} GiB each), {d.layout}, KV {d.kv_dtype}{draft}",
        f"vLLM may use {gib(plan.budget)} GiB of each GPU ({d.utilisation:.0%})",
    ]
    for stage in plan.stages:
        lines += ["", *_stage_lines(plan, stage)]
    return "\n".join([*lines, "", *_page_lines(plan), "", *_answer_lines(plan)])


def _stage_lines(plan: Plan, stage: Stage) -> list[str]:
    title = (
        "On each GPU" if len(plan.stages) == 1 else f"On each GPU of layers {stage.layers.start} to {stage.layers[-1]}"
    )
    lines = [f"{title}, GiB:"]
    lines += [f"  {name:<32}{gib(size):>9}" for name, size in stage.parts.items() if size]
    pool = "cache" if stage.pool >= 0 else "short of"
    lines.append(f"  {pool:<32}{gib(abs(stage.pool)):>9}   {stage.blocks} blocks")
    return [*lines, *_bars(plan, stage)]


def _bars(plan: Plan, stage: Stage) -> list[str]:
    total = plan.deployment.gpu.memory
    return [
        f"  {name:<22}|{'█' * min(round(size / total * _BAR), _BAR):<{_BAR}}| {size / total:5.1%}"
        for name, size in segments(plan, stage)
    ]


def _page_lines(plan: Plan) -> list[str]:
    p = plan.tightest.pages
    groups = f"{p.mla_groups} of MLA, {p.kda_groups} of KDA" + (
        f", {p.window_groups} of the draft" if p.window_groups else ""
    )
    return [
        f"Blocks of {p.block} tokens, pages of {p.page} bytes",
        f"A KDA state of {p.state} bytes is padded by {p.padding:.2%}",
        f"Groups: {groups}, {p.group} layers each, {p.absent_layers} of them absent KDA layers",
        f"A block of rows costs {p.block_bytes / _MIB:.2f} MiB, a kept state {p.state_block_bytes / _MIB:.2f} MiB",
    ]


def _answer_lines(plan: Plan) -> list[str]:
    d = plan.deployment
    lines = [f"Longest single request: {plan.longest} tokens", "Requests at once that share nothing:"]
    lines += [f"  {context:>9} tokens: {plan.requests(context)}" for context in contexts(plan)]
    asked = f"{d.requests} request{'s' * (d.requests != 1)} of {d.context} tokens"
    if plan.fits:
        lines.append(f"Asked for: {asked}: fits; of the cache on each GPU, GiB:")
        return [*lines, *(f"  {name:<32}{size / GIB:>9.2f}" for name, size in plan.usage.items())]
    return [*lines, f"Asked for: {asked}: does not fit. Instead:", *(f"  {text}" for text in alternatives(plan))]
