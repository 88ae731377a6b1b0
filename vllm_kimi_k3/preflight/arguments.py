"""Arguments of ``vllm serve`` as options by name, read without importing vLLM, which takes longer than a check may.

vLLM's own parser stays the judge: the tests compare the two on every recipe. Names of the options of the supported
releases are recorded in ``options.txt`` by ``packaging/record_options``.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

_SHORT = {
    "-asc": "api-server-count",
    "-q": "quantization",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dpr": "data-parallel-start-rank",
    "-dpl": "data-parallel-size-local",
    "-dpa": "data-parallel-address",
    "-dpp": "data-parallel-rpc-port",
    "-dpb": "data-parallel-backend",
    "-dph": "data-parallel-hybrid-lb",
    "-dpe": "data-parallel-external-lb",
    "-dpm": "data-parallel-multi-port-external-lb",
    "-ep": "enable-expert-parallel",
    "-sc": "speculative-config",
    "-cc": "compilation-config",
    "-ac": "attention-config",
}
_MODEL = "model"


class ArgumentError(ValueError):
    """The arguments cannot be read."""


@cache
def known_options(release: str = "") -> Mapping[str, bool]:
    """Long option names to whether they take no value.

    Args:
        release: "0.32" or "0.33"; all supported ones if empty.
    """
    lines = files("vllm_kimi_k3.preflight").joinpath("options.txt").read_text().splitlines()
    entries = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: kind == "flag" for name, kind, releases in entries if not release or release in releases.split(",")}


def read_arguments(arguments: Sequence[str], config: Path | None = None) -> tuple[dict[str, Any], list[str]]:
    """Options by name with underscores, and the names that no supported vLLM knows.

    Values are read as YAML, so numbers, booleans and JSON objects come out as such. Arguments win over the file. The
    model is under ``"model"``.

    Args:
        arguments: what would follow ``vllm serve``; ``--config FILE`` may be among them.
        config: a file of options, for ``--config``.

    Raises:
        ArgumentError: the file cannot be read, or the arguments have a value without an option.
    """
    given: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            if _MODEL in given:
                raise ArgumentError(f"{word!r}: the model is {given[_MODEL]!r} already, and no option takes this value")
            given[_MODEL] = word
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name, name.lstrip("-")).replace("_", "-")
        if equals:
            _put(given, name, _value(value))
        elif _is_flag(name) or not rest or _is_option(rest[0]):
            _put(given, name, True)
        else:
            _put(given, name, _value(rest.pop(0)))
    path = given.pop("config", None) or config
    options = _read_file(Path(path)) if path else {}
    options |= given
    options.setdefault(_MODEL, options.pop("model_tag", None))
    unknown = [name.replace("_", "-") for name in options if name.replace("_", "-") not in known_options()]
    return options, unknown


def suggestion(name: str) -> str | None:
    """The known option that looks most like ``name``."""
    close = difflib.get_close_matches(name, known_options(), 1)
    return close[0] if close else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ArgumentError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {path}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ArgumentError(f"--config {path}: expected options and their values, found {type(content).__name__}")
    options: dict[str, Any] = {}
    for name, value in content.items():
        _put(options, str(name).replace("_", "-"), value)
    return options


def _put(options: dict[str, Any], name: str, value: Any) -> None:
    """Note an option; ``no-x`` is x false, ``a.b`` is field b of a."""
    name, *path = name.split(".")
    if name.startswith("no-") and name[3:] in known_options():
        name, value = name[3:], not value
    name = name.replace("-", "_")
    if not path:
        options[name] = value
        return
    here = options[name] = dict(options.get(name) or {})
    for part in path[:-1]:
        here = here.setdefault(part.replace("-", "_"), {})
    here[path[-1].replace("-", "_")] = value


def _is_flag(name: str) -> bool:
    known = known_options()
    return known.get(name, False) or (name.startswith("no-") and known.get(name[3:], False))


def _is_option(word: str) -> bool:
    return word.startswith("--") or word in _SHORT


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            return text
