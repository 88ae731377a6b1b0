"""The files of a checkpoint: index, headers, and reading slices, one tensor alive at a time."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_kimi_k3.model.weights import VISION, Item, Problem, WeightError, WeightPlan

INDEX = "model.safetensors.index.json"
#: More than any header of a real shard; a longer one means that the file is not a safetensors file.
_HEADER_LIMIT = 1 << 28
#: Bytes that the system is asked to have read beyond the slice in hand.
_AHEAD = 64 << 20


def read_index(checkpoint: Path) -> dict[str, str]:
    """Every tensor name of a checkpoint to its shard file, from the index or, without one, from the single file.

    Raises:
        WeightError: neither is there, or it cannot be read.
    """
    index = checkpoint / INDEX
    if not index.exists():
        single = "model.safetensors"
        return dict.fromkeys(read_header(checkpoint, single), single)
    try:
        shards = json.loads(index.read_bytes())["weight_map"]
        if not all(isinstance(shard, str) for shard in shards.values()):
            raise TypeError("a shard is not a file name")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError([Problem("every tensor", INDEX, "a weight_map of names to files", repr(error))]) from error
    return shards


def has_vision(checkpoint: Path) -> bool:
    """Whether a checkpoint has tensors of the vision tower; one that cannot be read has what its config says."""
    try:
        return any(name.startswith(VISION) for name in read_index(checkpoint))
    except WeightError:
        return True


def read_header(checkpoint: Path, shard: str) -> dict[str, dict[str, Any]]:
    """Tensor name to ``dtype``, ``shape`` and ``data_offsets`` of one shard file, without reading its data.

    Raises:
        WeightError: the file is missing, too short for what it says it holds, or no safetensors file.
    """

    def fault(expected: str, found: str) -> WeightError:
        return WeightError([Problem("every tensor", shard, expected, found)])

    path = checkpoint / shard
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= _HEADER_LIMIT else b""
        size = path.stat().st_size
    except OSError as error:
        raise fault("a file that can be read", error.strerror or repr(error)) from error
    try:
        header: dict[str, dict[str, Any]] = json.loads(raw)
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise fault("a safetensors header", f"{size} bytes that do not begin with one") from error
    if size != end:
        raise fault(f"{end} bytes, as its header says", f"{size} bytes")
    return header


def check_headers(plan: WeightPlan, checkpoint: Path) -> None:
    """Check name, shape and type of every tensor of the plan against the headers of the shard files.

    Raises:
        WeightError: all faults of all files: files that are missing or cut short; tensors that are not in the file that
            the index names, that the index does not put there, or that have another shape or type.
    """
    problems: list[Problem] = []
    for shard, items in _by_shard(plan).items():
        try:
            header = read_header(checkpoint, shard)
        except WeightError as error:
            problems += error.problems
            continue
        for name, item in items.items():
            entry = header.get(name)
            if entry is None:
                problems.append(Problem(name, shard, item.expected(), "no such tensor"))
            elif problem := item.mismatch(entry["shape"], entry["dtype"]):
                problems.append(problem)
        problems += [
            Problem(name, shard, "only tensors that the index puts there", f"one of shape {entry['shape']}")
            for name, entry in header.items()
            if plan.shards.get(name) != shard
        ]
    if problems:
        raise WeightError(problems)


def iterate(plan: WeightPlan, checkpoint: Path) -> Iterator[tuple[Item, Tensor]]:
    """This rank's slice of every tensor of the plan, in the order of the files' bytes.

    A slice lies in the mapped file and lives until the next one is asked for; copy it.

    Raises:
        WeightError: a file cannot be read, or a value is not finite.
    """
    for shard, items in _by_shard(plan).items():
        try:
            with safe_open(checkpoint / shard, framework="pt") as file, _Ahead(checkpoint, shard, items) as ahead:
                for name in file.offset_keys():
                    item = items.get(name)
                    if item is not None:
                        ahead.reach(name)
                        yield item, item.checked(item.take(file.get_slice(name)))
        except (SafetensorError, OSError) as error:
            raise WeightError([Problem("every tensor", shard, "a safetensors file", str(error))]) from error


class _Ahead:
    """Has the system read what comes next in a file while the slice in hand is copied, where it can be told to.

    Args:
        checkpoint: the checkpoint.
        shard: the file.
        items: what is read of it.
    """

    def __init__(self, checkpoint: Path, shard: str, items: dict[str, Item]) -> None:
        path = checkpoint / shard
        header = read_header(checkpoint, shard)
        data = path.stat().st_size - max((entry["data_offsets"][1] for entry in header.values()), default=0)
        spans = {name: _span(items[name], entry) for name, entry in header.items() if name in items}
        self._spans = {name: (data + start, data + end) for name, (start, end) in spans.items()}
        self._coming = sorted(self._spans.values(), reverse=True)
        self._file = path.open("rb")

    def __enter__(self) -> "_Ahead":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reach(self, name: str) -> None:
        """Note that the slice of this tensor comes now."""
        limit = self._spans[name][1] + _AHEAD
        while self._coming and self._coming[-1][0] < limit:
            start, end = self._coming.pop()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)


def _span(item: Item, entry: dict[str, Any]) -> tuple[int, int]:
    """First and last byte of a stored tensor, by its header entry, that a slice lies in; columns lie in all of it."""
    start, end = entry["data_offsets"]
    slot = item.slot
    if slot.dim:
        return start, end
    row = (end - start) // entry["shape"][0]
    return start + slot.start * row, start + (slot.start + slot.length) * row


def _by_shard(plan: WeightPlan) -> dict[str, dict[str, Item]]:
    grouped: dict[str, dict[str, Item]] = {}
    for item in plan.items:
        grouped.setdefault(item.shard, {})[item.name] = item
    return grouped
