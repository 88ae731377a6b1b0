"""How a function of vLLM's is replaced: once, and only when it looks as it is known."""

import inspect
from collections.abc import Callable
from typing import Any

_patched: dict[Any, set[str]] = {}


def wrap(owner: Any, name: str, parameters: tuple[str, ...], make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `make` makes of it, once, after checking how its parameters begin.

    Raises RuntimeError where they begin otherwise: this vLLM is not one that the patch was written for.
    """
    if name in _patched.setdefault(owner, set()):
        return
    original = vars(owner).get(name)
    function = getattr(original, "__func__", original)
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if found[: len(parameters)] != parameters:
        where = f"{owner.__name__}.{name}"
        raise RuntimeError(f"cannot patch {where}: its parameters are {found}, expected {parameters}…")
    setattr(owner, name, make(original))
    _patched[owner].add(name)
