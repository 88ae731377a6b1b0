"""Rate and memory of loading, beside a raw read of the same files.

    python -m benchmarks.loading [--directory DIRECTORY] [--repeats 3] [--json FILE]

Writes a checkpoint of about 2 GB with the release's names, kinds, types and expert sizes, but fewer layers and experts
and a narrower stream. Each rank is a process that does what the plugin does in vLLM: index, plan, headers, slices into
parameters. Before each run the system is asked to forget the files. A raw read is one process that reads all of them
front to back by 8 MiB. The rate of several ranks is that of their bytes together, from the first start to the last end.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import date
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_kimi_k3.model.layout import EXPERTS, Share, Slot, expert_slots, layer_slots, model_slots
from vllm_kimi_k3.model.shards import INDEX, check_headers, iterate, read_index
from vllm_kimi_k3.model.weights import Item, WeightPlan, fill, plan_weights
from vllm_kimi_k3.plan.release import STORED_FP32, TEXT

#: The release, narrower and with fewer layers (three of KDA, one of MLA) and experts.
SIZES: Any = SimpleNamespace(
    **vars(TEXT)
    | {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 8192, "num_experts": 16, "vocab_size": 16384}
)
_SHARD = 512 << 20
_CHUNK = 8 << 20
_ROOT = "language_model."


def published() -> Iterator[tuple[str, Slot]]:
    """Every tensor of the checkpoint, in the order of its layers."""
    whole = Share(range(SIZES.num_hidden_layers))
    for tail, slot in model_slots(SIZES, whole).items():
        yield _ROOT + tail, slot
    for layer in whole.layers:
        stem = f"{_ROOT}model.layers.{layer}."
        for tail, slot in layer_slots(SIZES, whole, layer).items():
            yield stem + tail, slot
        if layer >= SIZES.first_k_dense_replace:
            for expert in range(SIZES.num_experts):
                for tail, slot in expert_slots(SIZES, whole).items():
                    yield f"{stem}{EXPERTS}.{expert}.{tail}", slot


def write(directory: Path) -> int:
    """Write the checkpoint; returns its bytes of tensors."""
    noise = torch.randn(1 << 20).bfloat16()
    shard: dict[str, torch.Tensor] = {}
    shards: dict[str, str] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        file = f"model-{len(set(shards.values())) + 1:05}.safetensors"
        save_file(shard, directory / file)
        shards.update(dict.fromkeys(shard, file))
        shard.clear()
        held = 0

    for name, slot in published():
        count = prod(slot.shape)
        tensor = noise.repeat(-(-count // len(noise)))[:count].reshape(slot.shape)
        if slot.quantised:
            tensor = (tensor * 16).clamp(0, 254).byte()
        elif name.endswith(STORED_FP32):
            tensor = tensor.float()
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
        if held >= _SHARD:
            flush()
    flush()
    (directory / INDEX).write_text(json.dumps({"weight_map": shards}))
    os.sync()
    return total


def forget(directory: Path) -> None:
    """Ask the system to drop what it has cached of the files."""
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw_rate(directory: Path) -> float:
    """Bytes a second of reading the files front to back."""
    forget(directory)
    buffer, done, began = bytearray(_CHUNK), 0, time.monotonic()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                done += count
    return done / (time.monotonic() - began)


def parameters(plan: WeightPlan) -> dict[str, torch.Tensor]:
    """Empty parameters of the shapes that the plan fills, their pages touched."""
    shapes: dict[str, list[int]] = {}
    types: dict[str, torch.dtype] = {}
    for item in plan.items:
        slot = item.slot
        shape = list(slot.shape)
        shape[slot.dim] = slot.length
        shape[0] += slot.row
        if slot.form == "conv":
            del shape[-2]
        if item.expert is not None:
            shape.insert(0, SIZES.num_experts)
        shapes[item.parameter] = max(shape, shapes.get(item.parameter, shape))
        types[item.parameter] = torch.uint8 if slot.quantised else torch.bfloat16
    return {name: torch.zeros(shape, dtype=types[name]).fill_(1) for name, shape in shapes.items()}


class Memory:
    """The most memory of this process, sampled: what is its own, and what it has mapped of files."""

    def __init__(self) -> None:
        self.own = self.mapped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.02):
            own, mapped = resident()
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


def resident() -> tuple[int, int]:
    """Bytes that are this process's own, and bytes that it has mapped of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    own, mapped = (int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssFile"))
    return own, mapped


def load(directory: Path, rank: int, ranks: int, ready: Any, results: Any) -> None:
    """One rank: the bytes it read, when it began and ended, and the memory that took beyond its parameters."""
    torch.set_num_threads(1)
    share = Share(range(SIZES.num_hidden_layers), tp_rank=rank, tp_size=ranks)
    empty = parameters(plan_weights(SIZES, read_index(directory), share))
    own, mapped = resident()
    read = 0

    def counted(plan: WeightPlan) -> Iterator[tuple[Item, torch.Tensor]]:
        nonlocal read
        for item, tensor in iterate(plan, directory):
            yield item, tensor
            read += tensor.nbytes

    ready.wait()
    began = time.monotonic()
    with Memory() as memory:
        plan = plan_weights(SIZES, read_index(directory), share)
        check_headers(plan, directory)
        fill(empty, counted(plan))
        ended = time.monotonic()
    results.put((read, began, ended, memory.own - own, memory.mapped - mapped))


def run(directory: Path, ranks: int) -> dict[str, float]:
    """Rate in bytes a second, the share of the files' bytes that a rank read, and the most memory of a rank."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(ranks + 1), context.Queue()
    processes = [
        context.Process(target=load, args=(directory, rank, ranks, ready, results), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    while ready.n_waiting < ranks:
        time.sleep(0.05)
    forget(directory)
    ready.wait()
    reports = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    read, began, ended, own, mapped = zip(*reports, strict=True)
    return {
        "rate": sum(read) / (max(ended) - min(began)),
        "read": max(read),
        "own": max(own),
        "mapped": max(mapped),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written (default: a temporary one)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        directory = Path(name)
        total = write(directory)
        rounds = [
            {"raw": raw_rate(directory), "tp1": run(directory, 1), "tp2": run(directory, 2)}
            for _ in range(options.repeats)
        ]
    rows = {}
    for kind in ("tp1", "tp2"):
        rows[kind] = {
            "GB/s": statistics.median(each[kind]["rate"] for each in rounds) / 1e9,
            "of raw": statistics.median(each[kind]["rate"] / each["raw"] for each in rounds),
            "read MB": rounds[0][kind]["read"] / 1e6,
            "own MB": max(each[kind]["own"] for each in rounds) / 1e6,
            "mapped MB": max(each[kind]["mapped"] for each in rounds) / 1e6,
        }
    raw = statistics.median(each["raw"] for each in rounds) / 1e9
    host = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    print(f"{date.today()}, {host}, torch {torch.__version__}")
    print(f"{total / 1e9:.2f} GB of tensors; raw read {raw:.2f} GB/s")
    for kind, row in rows.items():
        print(kind, ", ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"total": total, "rounds": rounds}, indent=2))


if __name__ == "__main__":
    main()
