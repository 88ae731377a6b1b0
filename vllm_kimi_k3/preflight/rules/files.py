"""The checkpoint's files: there, whole, of K3, with room and in time."""

from collections.abc import Iterator

from vllm_kimi_k3.plan import release
from vllm_kimi_k3.plan.gpus import GIB
from vllm_kimi_k3.plan.weights import stored_bytes
from vllm_kimi_k3.preflight.checkpoint import Checkpoint
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning

_TYPES = ("kimi_k3", "kimi_linear")
#: Seconds that vLLM waits for its engine, where VLLM_ENGINE_READY_TIMEOUT_S does not say otherwise.
_TIMEOUT = 600
_SHOWN = 3


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about the files; none if they were not looked at."""
    checkpoint = facts.checkpoint
    if checkpoint is None:
        return
    if checkpoint.directory is None:
        yield from _download(checkpoint)
        return
    yield from _config(checkpoint)
    yield from _shards(checkpoint)
    if not checkpoint.tokenizer:
        yield error(
            "tokenizer-file",
            f"{checkpoint.name} has no tiktoken.model",
            "there is no vocabulary to make ids with",
            "download the repository whole, not the weights alone",
        )
    if checkpoint.rate and checkpoint.total_size:
        yield from _time(facts, checkpoint.rate, checkpoint.total_size)


def _download(checkpoint: Checkpoint) -> Iterator[Finding]:
    needed = stored_bytes(release.TEXT, release.VISION)
    if checkpoint.free is not None and checkpoint.free < needed:
        yield error(
            "disk-space",
            f"{checkpoint.name} is not on this machine, and {checkpoint.free / GIB:.0f} GiB are free for it",
            f"its files take {needed / GIB:.0f} GiB",
            "point HF_HOME or --download-dir at a larger disk",
        )


def _config(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.config
    if config is None:
        problem = checkpoint.problems.get("config.json", "not an object")
        yield error("config", f"{checkpoint.name}/config.json: {problem}", "vLLM does not start", "download it again")
    elif config.get("model_type") not in _TYPES:
        yield error(
            "not-k3",
            f"{checkpoint.name} is of model_type {config.get('model_type')!r}",
            "the plugin serves Kimi K3",
            "give the directory or the hub name of a Kimi K3",
        )


def _shards(checkpoint: Checkpoint) -> Iterator[Finding]:
    bad = {file: problem for file, problem in checkpoint.problems.items() if file != "config.json"}
    missing = [file for file, problem in bad.items() if "No such file" in problem]
    damaged = [f"{file}: {problem}" for file, problem in bad.items() if file not in missing]
    if missing:
        yield error(
            "shards-missing",
            f"{len(missing)} files that the index names are not in {checkpoint.name}: {_some(missing)}",
            "loading stops after minutes, at the first tensor of the first of them",
            f"hf download {checkpoint.name} {' '.join(missing[:_SHOWN])}",
        )
    if damaged:
        yield error(
            "shards-damaged",
            f"{len(damaged)} files of {checkpoint.name} are not what they should be: {_some(damaged)}",
            "a download was cut short, or a file is a pointer and not the data",
            "delete them and download them again",
        )
    if checkpoint.present and checkpoint.total_size and checkpoint.present != checkpoint.total_size:
        yield error(
            "index-size",
            f"the files hold {checkpoint.present} bytes of tensors, the index says {checkpoint.total_size}",
            "index and files are of different revisions",
            "download the repository again, all of one revision",
        )


def _time(facts: Facts, rate: float, size: int) -> Iterator[Finding]:
    seconds = size / rate / facts.serving.nodes
    limit = int(facts.serving.environ.get("VLLM_ENGINE_READY_TIMEOUT_S") or _TIMEOUT)
    if seconds > limit:
        yield warning(
            "slow-disk",
            f"{size / GIB:.0f} GiB at the {rate / GIB:.2f} GiB/s measured take {seconds / 60:.0f} minutes",
            f"vLLM gives its engine {limit} seconds to get ready",
            f"VLLM_ENGINE_READY_TIMEOUT_S={int(seconds * 1.5)}, or faster storage",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
