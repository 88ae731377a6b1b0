"""A deployment without fault, in which tests plant one."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dspark.conftest import INFERACT
from vllm_kimi_k3.nano.checkpoint import build
from vllm_kimi_k3.plan.gpus import find
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.machine import Machine
from vllm_kimi_k3.preflight.serving import Serving

OPTIONS: dict[str, Any] = {
    "model": "moonshotai/Kimi-K3",
    "tensor_parallel_size": 8,
    "max_model_len": 131072,
    "enable_prefix_caching": True,
    "enable_auto_tool_choice": True,
    "tool_call_parser": "kimi_k3",
    "reasoning_parser": "kimi_k3",
}
DRAFT: dict[str, Any] = {
    "method": "dspark",
    "model": "Inferact/Kimi-K3-DSpark",
    "num_speculative_tokens": 7,
    "attention_backend": "FLASHINFER_MLA",
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "block",
}


def node(gpu: str = "b300", count: int = 8, **changes: Any) -> Machine:
    """A healthy node."""
    healthy: dict[str, Any] = {
        "gpus": (find(gpu),) * count,
        "driver": (580, 95),
        "cuda": (13, 0),
        "nccl": (2, 28, 9),
        "nvlink": True,
        "shm": 64 << 30,
        "memory": 2 << 40,
        "packages": {"vllm": "0.33.0", "fastsafetensors": "0.1.15"},
    }
    return Machine(**(healthy | changes))


def serving(environ: dict[str, str] | None = None, unknown: tuple[str, ...] = (), **changes: Any) -> Serving:
    """The options above with some changed; None takes one away."""
    return Serving({k: v for k, v in (OPTIONS | changes).items() if v is not None}, environ or {}, unknown)


def facts(machine: Machine | None = None, environ: dict[str, str] | None = None, **changes: Any) -> Facts:
    """The deployment, nothing looked at on disk."""
    return Facts(serving(environ, **changes), machine or node())


@pytest.fixture(scope="session")
def healthy_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature in the published layout."""
    return build(tmp_path_factory.mktemp("preflight") / "nano", seed=3)


@pytest.fixture
def checkpoint(healthy_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may break."""
    copy = tmp_path / "nano"
    copy.mkdir()
    for file in healthy_checkpoint.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture
def draft_directory(tmp_path: Path) -> Callable[..., Path]:
    """Writes a draft's directory from its published config with some fields changed; None takes one away."""

    def write(**changes: Any) -> Path:
        directory = tmp_path / "Kimi-K3-DSpark"
        directory.mkdir(exist_ok=True)
        fields = {name: value for name, value in (INFERACT | changes).items() if value is not None}
        (directory / "config.json").write_text(json.dumps(fields))
        return directory

    return write
