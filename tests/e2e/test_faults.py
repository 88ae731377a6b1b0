"""What a user sees when a checkpoint is at fault: one error that names the tensor and its file, and no process left."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import REPOSITORY
from tests.e2e.processes import left
from vllm_kimi_k3.cli.server import Server, ServerError
from vllm_kimi_k3.model.shards import INDEX

pytestmark = pytest.mark.slow

GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
QUERY = "language_model.model.layers.0.self_attn.q_proj.weight"
EXTRA = "language_model.model.layers.0.self_attn.q_proj.bias"


def index(checkpoint: Path) -> dict[str, str]:
    return json.loads((checkpoint / INDEX).read_text())["weight_map"]


def changed(source: Path, out: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> Path:
    """A copy of a checkpoint with one tensor changed or, without a change, taken away."""
    out.mkdir()
    shard = index(source)[name]
    for file in source.iterdir():
        if file.name not in (shard, INDEX):
            (out / file.name).symlink_to(file)
    tensors = load_file(source / shard)
    tensor = tensors.pop(name)
    names = index(source)
    if change is None:
        del names[name]
    else:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, out / shard)
    (out / INDEX).write_text(json.dumps({"weight_map": names}))
    return out


def with_extra(source: Path, out: Path) -> Path:
    """A copy with a tensor that the model does not have, in the index too."""
    changed(source, out, QUERY, lambda tensor: tensor)
    shard = index(source)[QUERY]
    save_file(load_file(out / shard) | {EXTRA: torch.zeros(4)}, out / shard)
    (out / INDEX).write_text(json.dumps({"weight_map": index(source) | {EXTRA: shard}}))
    return out


def cut_short(source: Path, out: Path) -> Path:
    """A copy with one shard a thousand bytes too short."""
    changed(source, out, QUERY, lambda tensor: tensor)
    file = out / index(source)[QUERY]
    file.write_bytes(file.read_bytes()[:-1000])
    return out


def with_nan(tensor: Tensor) -> Tensor:
    """NaN in the last row, which the last rank of several reads."""
    tensor = tensor.clone()
    tensor[-1, 0] = torch.nan
    return tensor


PLANTED: dict[str, Callable[[Path, Path], Path]] = {
    "sound": lambda source, out: changed(source, out, GATE, lambda tensor: tensor),
    "missing": lambda source, out: changed(source, out, GATE, None),
    "misshapen": lambda source, out: changed(source, out, GATE, lambda tensor: tensor[:, :-1]),
    "not finite": lambda source, out: changed(source, out, QUERY, with_nan),
    "extra": with_extra,
    "cut short": cut_short,
}


@pytest.fixture(scope="module")
def ends(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """How the engine ends on each planted fault; one process starts them all."""
    root = tmp_path_factory.mktemp("faults")
    directories = [plant(checkpoint, root / name.replace(" ", "-")) for name, plant in PLANTED.items()]
    command = [sys.executable, "-m", "tests.e2e.starts", str(root / "out.json"), *map(str, directories)]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(PLANTED, json.loads((root / "out.json").read_text()), strict=True))


def test_a_sound_checkpoint_is_served(ends: dict[str, dict[str, str]]) -> None:
    assert ends["sound"] == {}


@pytest.mark.parametrize(
    ("fault", "tensor", "expected", "found"),
    [
        ("missing", GATE, "[{rows}, {width}] BF16 or F16 or F32", "no such tensor"),
        ("misshapen", GATE, "[{rows}, {width}] BF16 or F16 or F32", "[{rows}, {less}] BF16"),
        ("not finite", QUERY, "of finite values", "NaN or infinite in the part this rank reads"),
        ("extra", EXTRA, "no such tensor", "a tensor that the model does not have"),
        ("cut short", "every tensor", "bytes, as its header says", " bytes"),
    ],
)
def test_the_error_names_tensor_file_expected_and_found(
    ends: dict[str, dict[str, str]], checkpoint: Path, fault: str, tensor: str, expected: str, found: str
) -> None:
    end = ends[fault]
    assert end["type"] == "WeightError"
    where = "the index" if fault == "missing" else index(checkpoint)[GATE if tensor == GATE else QUERY]
    lines = end["text"].splitlines()
    assert len(lines) == 2 and "1 tensor at fault" in lines[0]
    head, _, rest = lines[1].partition(": expected ")
    assert head.strip() == f"{tensor} in {where}"
    says, _, seen = rest.partition(", found ")
    rows, width = load_file(checkpoint / index(checkpoint)[GATE])[GATE].shape
    sizes = {"rows": rows, "width": width, "less": width - 1}
    assert expected.format(**sizes) in says and found.format(**sizes) in seen


@pytest.mark.server
def test_a_fault_that_one_rank_reads_stops_the_server(checkpoint: Path, tmp_path: Path) -> None:
    faulty = changed(checkpoint, tmp_path / "faulty", QUERY, with_nan)
    arguments = ["--config", str(REPOSITORY / "recipes" / "nano-cpu.yaml"), "--tensor-parallel-size", "2"]
    cores = sorted(os.sched_getaffinity(0))
    server = Server(
        faulty,
        arguments,
        environment={"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}"},
        log=tmp_path / "log",
        timeout=500,
    )
    with pytest.raises(ServerError, match="vllm serve ended with 1"), server:
        pass
    assert left(server.pid) == {}
    told = [line for line in server.log().splitlines() if "WeightError: " in line and "WorkerProc" not in line]
    assert len(told) == 1, told
    assert f"{QUERY} in {index(checkpoint)[QUERY]}: expected " in server.log()
    assert "NaN or infinite in the part this rank reads" in server.log()
