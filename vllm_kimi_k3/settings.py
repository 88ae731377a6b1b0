"""Every setting of the plugin: one typed object, read once from the environment.

A setting is a field of :class:`Settings`; its environment variable is ``VLLM_KIMI_K3_`` and the field's name in
capitals. Booleans are 1/0, true/false, yes/no, on/off.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_type_hints

PREFIX = "VLLM_KIMI_K3_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


@dataclass(frozen=True)
class Settings:
    """The plugin's settings with their defaults."""

    #: Leave vLLM as it is: the plugin registers nothing.
    disable: bool = False
    #: Look the deployment over when `vllm serve` starts: log what is doubtful, stop on what cannot work.
    preflight: bool = True
    #: Deliver the reasoning as content too where a message ends with neither content nor calls.
    answer_from_reasoning: bool = False
    #: Megabytes of past thinking kept to give back to clients that drop it; 0 keeps none.
    thinking_store_mb: int = 256
    #: Take only the effort names of Moonshot's own encoder (none, low, high, max), refuse the others.
    strict_effort: bool = False
    #: Report prompt tokens as Moonshot's service does: the opener of the model's turn (three tokens) is not counted.
    moonshot_token_count: bool = False
    #: Tokens of the prefix cache's hash unit: prefixes are found in steps of it. 128 or 64.
    hash_unit: int = 128
    #: The largest part of the cache's blocks that kept KDA states may hold, in (0, 1].
    state_share: float = 0.75
    #: Whose model class runs K3: this plugin's, or vLLM's own with the rest of the plugin but its prefix cache.
    model: str = "plugin"
    #: Which implementation an operation uses where several fit: "experts=marlin,router=reference". Docs: kernels.md.
    operations: str = ""

    @property
    def own_model(self) -> bool:
        """Whether the model class is this plugin's.

        Raises:
            SettingError: :attr:`model` is neither "plugin" nor "vllm".
        """
        if self.model not in ("plugin", "vllm"):
            raise SettingError(f"{PREFIX}MODEL={self.model!r}: expected plugin or vllm")
        return self.model == "plugin"

    @property
    def wanted_operations(self) -> dict[str, str]:
        """:attr:`operations` as a mapping from operation to implementation.

        Raises:
            SettingError: an entry is not "name=implementation".
        """
        entries = [entry.strip() for entry in self.operations.split(",") if entry.strip()]
        pairs = [entry.partition("=") for entry in entries]
        wrong = [entry for entry, (name, _, label) in zip(entries, pairs, strict=True) if not name or not label]
        if wrong:
            raise SettingError(f"{PREFIX}OPERATIONS: {wrong[0]!r}: expected operation=implementation")
        return {name.strip(): label.strip() for name, _, label in pairs}


class SettingError(ValueError):
    """An environment variable of the plugin has a value that it cannot have."""


def _parse(name: str, kind: type, text: str) -> Any:
    if kind is bool:
        value = text.strip().lower()
        if value in _TRUE or value in _FALSE:
            return value in _TRUE
        raise SettingError(f"{name}={text!r}: expected 1 or 0")
    try:
        return kind(text)
    except ValueError:
        raise SettingError(f"{name}={text!r}: expected a value of type {kind.__name__}") from None


def read(environ: Mapping[str, str]) -> Settings:
    """Settings from a mapping of environment variables.

    Variables of the prefix that name no setting are left alone: vLLM's own K3 has some.

    Raises:
        SettingError: a variable has a value of the wrong type.
    """
    values = {}
    for field, kind in get_type_hints(Settings).items():
        name = PREFIX + field.upper()
        if name in environ:
            values[field] = _parse(name, kind, environ[name])
    return Settings(**values)


@cache
def settings() -> Settings:
    """The settings of this process."""
    return read(os.environ)
