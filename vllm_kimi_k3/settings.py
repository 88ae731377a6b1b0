"""Every setting of the plugin: one typed object, read once from the environment.

A setting is a field of :class:`Settings`; its environment variable is ``VLLM_KIMI_K3_`` and the field's name in
capitals. Booleans are 1/0, true/false, yes/no, on/off.
"""

import os
from dataclasses import dataclass, fields
from functools import cache

PREFIX = "VLLM_KIMI_K3_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Settings:
    """The plugin's settings with their defaults."""

    #: Leave vLLM as it is: the plugin registers nothing.
    disable: bool = False


class SettingError(ValueError):
    """An environment variable of the plugin has a value that it cannot have."""


def _parse(name: str, kind: type, text: str) -> object:
    if kind is bool:
        value = text.strip().lower()
        if value in _TRUE or value in _FALSE:
            return value in _TRUE
        raise SettingError(f"{name}={text!r}: expected 1 or 0")
    try:
        return kind(text)
    except ValueError:
        raise SettingError(f"{name}={text!r}: expected a value of type {kind.__name__}") from None


def read(environ: dict[str, str]) -> Settings:
    """Settings from a mapping of environment variables.

    Raises:
        SettingError: a variable has a value of the wrong type, or no setting has that name.
    """
    known = {PREFIX + field.name.upper(): field for field in fields(Settings)}
    values = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX):
            continue
        field = known.get(name)
        if field is None:
            # vLLM's own K3 reads variables of the same prefix; they are not ours to judge.
            continue
        kind = field.type if isinstance(field.type, type) else {"bool": bool, "int": int, "float": float}.get(field.type, str)
        values[field.name] = _parse(name, kind, text)
    return Settings(**values)


@cache
def settings() -> Settings:
    """The settings of this process."""
    return read(dict(os.environ))
