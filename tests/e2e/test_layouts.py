"""The same answers however the engine is laid out: tensor parallel, pipeline parallel, a pool too small for all."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.e2e import scenario
from tests.e2e.driver import Answer, Engine, assert_same

pytestmark = pytest.mark.slow


def run(
    checkpoint: Path, out: Path, settings: dict[str, Any], lengths: Sequence[int]
) -> tuple[list[Answer], list[Answer], int]:
    """The scenario's requests on an engine with these settings; its log is shown when it fails."""
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if ranks > 1:
        # vLLM wants a NUMA node for each rank unless it is told which cores to take.
        cores = sorted(os.sched_getaffinity(0))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    arguments = [str(checkpoint), json.dumps(settings), json.dumps(lengths), str(out)]
    command = [sys.executable, "-m", "tests.e2e.scenario", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return scenario.load(out)


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp2", "pp2"])
def test_two_ranks_equal_one(engine: Engine, checkpoint: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    expected = [engine.run([ids], new=scenario.NEW)[0] for ids in scenario.prompts(scenario.MIXED)]
    settings = {"dtype": "float32", **settings}
    answers, again, _ = run(checkpoint, tmp_path / "out.json", settings, scenario.MIXED)
    for one, two, repeated in zip(expected, answers, again, strict=True):
        assert_same(one, two)
        assert_same(one, repeated)
    assert any(answer.cached > 0 for answer in again)


def test_preemption_in_a_tiny_pool_gives_the_same_tokens(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    expected = [engine.run([ids], new=scenario.NEW)[0] for ids in scenario.prompts(scenario.GROWING)]
    settings = {"dtype": "float32", "num_gpu_blocks_override": 14, "max_model_len": 1024}
    answers, _, preempted = run(checkpoint, tmp_path / "out.json", settings, scenario.GROWING)
    assert preempted > 0
    for one, two in zip(expected, answers, strict=True):
        assert_same(one, two)
