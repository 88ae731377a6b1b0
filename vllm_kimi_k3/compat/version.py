"""Which vLLM the plugin runs on."""

import importlib
import re
from typing import Any

SUPPORTED = ((0, 32), (0, 34))
SUPPORTED_TEXT = ">=0.32,<0.34"


def load(target: str) -> Any:
    """The object that a ``"module:name"`` string names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def version_problem(version: str | None = None) -> str | None:
    """Why the plugin cannot run on this vLLM, or None.

    Args:
        version: a vLLM version string; the installed one if None.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"vLLM's version {version!r} is not a release number; the supported range is {SUPPORTED_TEXT}"
    low, high = SUPPORTED
    if not low <= (int(match[1]), int(match[2])) < high:
        return f"vLLM {version} is outside the supported range {SUPPORTED_TEXT}; install a vLLM in that range"
    return None
