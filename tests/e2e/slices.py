"""What one tensor-parallel rank holds of K3's layers, as a model of its own, and its plan.

A slice is served by one process, with the page and state sizes of a rank of the whole model: K3's cache on hardware
that holds a few layers of it.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine import slice_config
from tests.e2e.driver import Engine
from vllm_kimi_k3.plan.gpus import find
from vllm_kimi_k3.plan.memory import Deployment, Plan
from vllm_kimi_k3.plan.parallel import Layout

#: Tokens of a request.
CONTEXT = 4096


def write_slice(directory: Path, ranks: int, layers: int, experts: int) -> Path:
    """A directory with the config of a slice, for ``load_format="dummy"``."""
    (directory / "config.json").write_text(json.dumps(slice_config(ranks, layers, experts)))
    return directory


def slice_settings() -> dict[str, Any]:
    """Of ``LLM`` for a slice: weights without a file, bf16, prefix caching on."""
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "max_num_seqs": 16,
    }


def slice_plan(ranks: int, layers: int, experts: int, pool: int) -> Plan:
    """The plan for a slice in one process with a cache of ``pool`` bytes."""
    text = SimpleNamespace(**slice_config(ranks, layers, experts))
    return Plan(Deployment(find("h200"), Layout(), context=CONTEXT, pool=pool, text=text, vision=None))


def cache_of(engine: Engine) -> dict[str, float]:
    """The engine's own figures of its cache: tokens of a block; bytes of a page, of a state, of all states' padding as
    a share; groups of each kind, layers of the largest, blocks."""
    from vllm.v1.kv_cache_interface import MambaSpec

    config = engine.scheduler.kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    rows = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    [block] = {spec.block_size for spec in rows}
    [page] = {spec.page_size_bytes for spec in specs}
    [state] = {spec.state_content_size_bytes for spec in states}
    return {
        "block": block,
        "page": page,
        "state": state,
        "padding": page / state - 1,
        "mla groups": len(rows),
        "kda groups": len(states),
        "group": max(len(group.layer_names) for group in config.kv_cache_groups),
        "blocks": config.num_blocks,
    }


def assert_cache_as_planned(engine: Engine, plan: Plan, within: float) -> None:
    """Every figure of the engine's cache is the plan's, up to a share."""
    stage, cache = plan.tightest, cache_of(engine)
    planned = {
        "block": stage.pages.block,
        "page": stage.pages.page,
        "state": stage.pages.state,
        "padding": stage.pages.padding,
        "mla groups": stage.pages.mla_groups,
        "kda groups": stage.pages.kda_groups,
        "group": stage.pages.group,
        "blocks": stage.blocks,
    }
    print(json.dumps({"engine": cache, "planned": planned}))
    assert cache == pytest.approx(planned, rel=within)
