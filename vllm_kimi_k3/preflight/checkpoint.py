"""What lies on disk: the checkpoint's config, its shards against the index, room for it, and how fast it reads."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_kimi_k3.model.shards import INDEX, read_header, read_index
from vllm_kimi_k3.model.weights import WeightError

_SAMPLE = 256 << 20
_CHUNK = 8 << 20
_SECONDS = 2.0


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, or the place where it will be.

    Attributes:
        name: as it was given.
        directory: where it lies; None if it has to be downloaded.
        config: its config.json; None if there is none, or it cannot be read.
        problems: file to what is wrong with it.
        total_size: bytes of tensors that the index states.
        present: bytes of tensors that the files' headers state; None if a header could not be read.
        free: bytes free where it lies or would be downloaded to.
        rate: bytes a second that its files are read at; None if that was not measured.
        tokenizer: whether ``tiktoken.model`` is there.
    """

    name: str
    directory: Path | None = None
    config: Mapping[str, Any] | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    total_size: int | None = None
    present: int | None = None
    free: int | None = None
    rate: float | None = None
    tokenizer: bool = True

    @property
    def text(self) -> Mapping[str, Any] | None:
        """The text config."""
        return self.config and (self.config.get("text_config") or self.config)


def inspect(name: str, environ: Mapping[str, str], download_dir: str | None = None, measure: bool = True) -> Checkpoint:
    """Look at a model.

    Args:
        name: a directory, or a name on the Hugging Face hub, which is looked up in the local cache only.
        environ: environment variables, for where the cache is.
        download_dir: vLLM's ``--download-dir``.
        measure: also read some hundred MiB to see how fast that goes.
    """
    home = Path(environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(download_dir or environ.get("HF_HUB_CACHE") or home / "hub")
    directory = Path(name) if Path(name).is_dir() else _snapshot(cache, name)
    if directory is None:
        return Checkpoint(name, free=_free(cache))
    problems: dict[str, str] = {}
    config = _config(directory, problems)
    sizes = _shards(directory, problems)
    index = directory / INDEX
    total = json.loads(index.read_bytes()).get("metadata", {}).get("total_size") if index.exists() and sizes else None
    return Checkpoint(
        name,
        directory,
        config,
        problems,
        total_size=total,
        present=sum(sizes.values()) if sizes and None not in sizes.values() else None,  # type: ignore[arg-type]
        free=_free(directory),
        rate=_rate(directory, sizes) if measure and sizes else None,
        tokenizer=(directory / "tiktoken.model").exists(),
    )


def read_rate(path: Path, limit: int = _SAMPLE) -> float:
    """Bytes a second of reading a file from the disk, as far as the system lets go of what it has cached."""
    done, started = 0, time.monotonic()
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while done < limit and time.monotonic() - started < _SECONDS and (chunk := file.read(_CHUNK)):
            done += len(chunk)
    return done / max(time.monotonic() - started, 1e-9)


def _config(directory: Path, problems: dict[str, str]) -> Mapping[str, Any] | None:
    try:
        config = json.loads((directory / "config.json").read_text())
    except OSError as error:
        problems["config.json"] = error.strerror or repr(error)
        return None
    except ValueError as error:
        problems["config.json"] = f"not JSON: {error}"
        return None
    return config if isinstance(config, dict) else None


def _shards(directory: Path, problems: dict[str, str]) -> dict[str, int | None]:
    """Bytes of tensors of each shard that the index names; None for one whose header cannot be read."""
    try:
        index = read_index(directory)
    except WeightError as error:
        problems[error.problems[0].shard] = str(error.problems[0])
        return {}
    named: dict[str, list[str]] = {}
    for name, shard in index.items():
        named.setdefault(shard, []).append(name)
    sizes: dict[str, int | None] = {}
    for shard, names in sorted(named.items()):
        try:
            header = read_header(directory, shard)
        except WeightError as error:
            problem = error.problems[0]
            problems[shard] = f"expected {problem.expected}, found {problem.found}"
            sizes[shard] = None
            continue
        sizes[shard] = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
        absent = [name for name in names if name not in header]
        if absent:
            problems[shard] = f"{len(absent)} tensors that the index puts there are not in it, {absent[0]} the first"
    return sizes


def _snapshot(cache: Path, name: str) -> Path | None:
    """The newest snapshot of a hub model in the local cache."""
    snapshots = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


def _free(path: Path) -> int | None:
    while not path.exists():
        if path == path.parent:
            return None
        path = path.parent
    return shutil.disk_usage(path).free


def _rate(directory: Path, sizes: Mapping[str, int | None]) -> float | None:
    """Of the largest shard that is there; None if it is too small to tell."""
    shards = [(size, name) for name, size in sizes.items() if size]
    size, name = max(shards, default=(0, ""))
    return read_rate(directory / name) if size >= _SAMPLE else None
