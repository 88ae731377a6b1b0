"""``plan`` against the engine: block size, pages, padding, state bytes, blocks, expert weights."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e.driver import Engine
from vllm_kimi_k3.plan.gpus import GIB, find
from vllm_kimi_k3.plan.memory import Deployment, Plan
from vllm_kimi_k3.plan.parallel import Layout


@pytest.fixture(scope="module")
def plan(checkpoint: Path) -> Plan:
    """The plan for the engine of these tests: one process, fp32, a cache of 1 GiB."""
    text = SimpleNamespace(**json.loads((checkpoint / "config.json").read_text())["text_config"])
    deployment = Deployment(
        find("cpu"), Layout(), kv_dtype="fp32", width=4, pool=GIB, context=2048, text=text, vision=None
    )
    return Plan(deployment)


def groups(engine: Engine) -> list[Any]:
    return engine.scheduler.kv_cache_config.kv_cache_groups


def test_block_page_state_and_padding_are_the_engines(engine: Engine, plan: Plan) -> None:
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [group.kv_cache_spec for group in groups(engine)]
    states = [spec for spec in specs if isinstance(spec, MambaSpec)]
    rows = [spec for spec in specs if not isinstance(spec, MambaSpec)]
    p = plan.tightest.pages
    assert {spec.block_size for spec in rows} == {p.block}
    assert {spec.page_size_bytes for spec in specs} == {p.page}
    assert {spec.state_content_size_bytes for spec in states} == {p.state}
    assert (len(rows), len(states)) == (p.mla_groups, p.kda_groups)
    assert max(len(group.layer_names) for group in groups(engine)) == p.group


def test_blocks_are_the_engines(engine: Engine, plan: Plan) -> None:
    assert engine.scheduler.kv_cache_config.num_blocks == pytest.approx(plan.tightest.blocks, rel=0.01)


def test_expert_weights_are_the_engines(engine: Engine, plan: Plan) -> None:
    # Other parameters are freed on CPU once vLLM has repacked them.
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    held = sum(parameter.numel() * parameter.element_size() for parameter in experts)
    assert held == plan.tightest.parts["weights: experts"]
