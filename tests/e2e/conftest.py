"""One engine on one random checkpoint for all end-to-end tests, and the reference model of the same weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.driver import Engine
from vllm_kimi_k3.nano.checkpoint import build
from vllm_kimi_k3.reference import KimiK3, load_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random K3 of a few million parameters in the published layout."""
    path = tmp_path_factory.mktemp("checkpoint") / "nano"
    build(path, seed=7)
    return path


@pytest.fixture(scope="session")
def oracle(checkpoint: Path) -> KimiK3:
    """The reference model of the checkpoint, fp32."""
    return load_checkpoint(checkpoint, torch.float32)


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    """The real engine in this process, fp32, prefix caching and chunked prefill on."""
    engine = Engine(checkpoint, dtype="float32")
    yield engine
    engine.close()
