"""Where the trained miniature and its draft lie in the package."""

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"


class NotPackagedError(FileNotFoundError):
    """This installation carries no trained miniature."""


def target_path() -> Path:
    """Directory of the trained miniature.

    Raises:
        NotPackagedError: names the directory that is missing and what to run instead.
    """
    return _existing("k3-nano")


def draft_path() -> Path:
    """Directory of its DSpark draft; raises as :func:`target_path`."""
    return _existing("k3-nano-dspark")


def _existing(name: str) -> Path:
    path = _ASSETS / name
    if not (path / "config.json").is_file():
        raise NotPackagedError(
            f"no trained miniature at {path}; `vllm-kimi-k3 nano build OUT` writes a random one, and docs/nano.md says "
            "how to train it"
        )
    return path
