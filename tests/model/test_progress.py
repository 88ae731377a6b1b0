"""Reports of a load: bytes, rate and time left, and the tensors untouched."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kimi_k3.model.layout import Share
from vllm_kimi_k3.model.progress import planned_bytes, watched
from vllm_kimi_k3.model.shards import iterate, read_index
from vllm_kimi_k3.model.weights import plan_weights
from vllm_kimi_k3.nano.checkpoint import build

GIB = 1 << 30


def slices(number: int) -> list[tuple[Any, torch.Tensor]]:
    """Tensors of a GiB each that take no memory."""
    return [(index, torch.zeros(1, dtype=torch.uint8).expand(GIB)) for index in range(number)]


def test_lines_give_bytes_rate_and_time_left() -> None:
    lines: list[str] = []
    seconds = count(0, 6)
    given = slices(4)
    got = list(watched(given, 4 * GIB, lines.append, lambda: float(next(seconds)), terminal=False))
    assert [item for item, _ in got] == [0, 1, 2, 3]
    assert all(one is other for (_, one), (_, other) in zip(given, got, strict=True))
    assert lines[0] == "loading: 2.0 of 4.0 GiB (50%), 0.17 GiB/s, 12 s left"
    assert lines[-1] == "loaded 4.00 GiB in 30.0 s, 0.13 GiB/s"


def test_a_fast_load_is_one_line() -> None:
    lines: list[str] = []
    list(watched(slices(3), 3 * GIB, lines.append, lambda: 1.0, terminal=False))
    assert len(lines) == 1


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    list(watched(slices(2), 2 * GIB, lines.append, terminal=True))
    assert "Loading K3: 100%" in capsys.readouterr().err
    assert len(lines) == 1


@pytest.mark.parametrize("tp", [1, 2])
def test_the_planned_bytes_are_those_that_are_read(tp: int, tmp_path: Path) -> None:
    checkpoint = build(tmp_path / "nano", seed=1)
    text = SimpleNamespace(**json.loads((checkpoint / "config.json").read_text())["text_config"])
    plan = plan_weights(text, read_index(checkpoint), Share(range(text.num_hidden_layers), tp_size=tp))
    read = sum(tensor.numel() * tensor.element_size() for _, tensor in iterate(plan, checkpoint))
    assert planned_bytes(plan.items) == pytest.approx(read, rel=0.01)
    assert read < sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / (1 if tp == 1 else 1.4)
