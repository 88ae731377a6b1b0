"""Simulations of the real scheduler at K3's cache geometry."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_kimi_k3.nano.checkpoint import build

PAGE, UNIT = 768, 128


@pytest.fixture(scope="session")
def config_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A function that makes an engine's config of a random miniature checkpoint."""
    from benchmarks.simulator import engine_config

    path: Path = build(tmp_path_factory.mktemp("cache") / "nano", seed=3)
    return cache(lambda **settings: engine_config(path, **settings))


@pytest.fixture(scope="session")
def simulate(config_of: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a simulation: ``simulate(blocks=200, unit=128, ahead=False, **engine_settings)``."""
    from benchmarks.simulator import Simulation
    from vllm_kimi_k3.cache.grouping import groups_of

    def make(blocks: int = 300, unit: int = UNIT, ahead: bool = False, **settings: Any) -> Simulation:
        config = config_of(**settings)
        groups = groups_of(specs(unit))
        return Simulation(config, groups, blocks, hash_block=unit // 2, page=PAGE, ours=True, ahead=ahead)

    return make


@pytest.fixture(scope="session")
def marks_of_miniature(config_of: Callable[..., Any]) -> Any:
    """The special ids of the miniature's vocabulary."""
    from vllm_kimi_k3.cache.policy import Marks

    return Marks.of_vocabulary(config_of().model_config.get_vocab_size())


def specs(unit: int = UNIT, drafts: int = 0) -> dict[str, Any]:
    """The specs of K3's layers on one of eight ranks, by name: 24 MLA, 69 KDA, and so many draft layers."""
    from vllm_kimi_k3.cache.spec import KdaStateSpec, LatentRowSpec

    rows = LatentRowSpec(block_size=PAGE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    states = KdaStateSpec(
        block_size=unit,
        shapes=((3, 4608), (12, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=rows.page_size_bytes,
        mamba_cache_mode="align",
    )
    layers: dict[str, Any] = {
        f"model.layers.{index}": rows if index % 4 == 3 or index == 92 else states for index in range(93)
    }
    return layers | {f"draft.layers.{index}": rows for index in range(drafts)}
