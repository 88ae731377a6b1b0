"""A preflight: gather the facts, apply the rules."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kimi_k3.preflight.arguments import read_arguments
from vllm_kimi_k3.preflight.checkpoint import Checkpoint, inspect
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding
from vllm_kimi_k3.preflight.machine import Machine
from vllm_kimi_k3.preflight.rules import cache, chat, draft, files, layout, memory, platform
from vllm_kimi_k3.preflight.serving import Serving

_RULES = (platform.check, layout.check, files.check, memory.check, cache.check, draft.check, chat.check)


def findings(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    found = [finding for rule in _RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: finding.level != "error")


def gather(
    arguments: Sequence[str],
    config: Path | None,
    machine: Machine,
    environ: Mapping[str, str],
    with_files: bool = True,
) -> Facts:
    """The facts about a ``vllm serve`` command.

    Args:
        arguments: what follows ``vllm serve``.
        config: its ``--config``.
        machine: the node.
        environ: environment variables.
        with_files: whether to look at the files of model and draft.

    Raises:
        ArgumentError: the arguments cannot be read.
    """
    options, unknown = read_arguments(arguments, config)
    serving = Serving(options, environ, tuple(unknown))
    if not with_files:
        return Facts(serving, machine)
    return Facts(serving, machine, _files(serving, options.get("model")), _draft(serving))


def _files(serving: Serving, model: Any) -> Checkpoint | None:
    return inspect(str(model), serving.environ, serving.get("download_dir")) if model else None


def _draft(serving: Serving) -> Checkpoint | None:
    model = serving.speculative.get("model")
    return inspect(str(model), serving.environ, serving.get("download_dir"), measure=False) if model else None
