"""Simulations of the real scheduler at K3's cache geometry."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.geometry import PAGE, UNIT, our_groups
from vllm_kimi_k3.nano.checkpoint import build


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

    def make(blocks: int = 300, unit: int = UNIT, ahead: bool = False, **settings: Any) -> Simulation:
        config = config_of(**settings)
        return Simulation(config, our_groups(unit), blocks, hash_block=unit // 2, page=PAGE, ours=True, ahead=ahead)

    return make


@pytest.fixture(scope="session")
def marks_of_miniature(config_of: Callable[..., Any]) -> Any:
    """The special ids of the miniature's vocabulary."""
    from vllm_kimi_k3.cache.policy import Marks

    return Marks.of_vocabulary(config_of().model_config.get_vocab_size())
