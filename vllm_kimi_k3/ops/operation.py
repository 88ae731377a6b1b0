"""One operation with its implementations, and which of them runs where."""

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from vllm_kimi_k3.settings import settings

logger = logging.getLogger("vllm.vllm_kimi_k3.ops")

_Candidate = tuple[str, Callable[..., bool], Callable[..., Any]]
_Fast = tuple[str, Callable[[torch.device], bool], Callable[..., bool], Callable[..., Any], bool]


class Operation:
    """A callable that runs the first fitting implementation on the device of its first tensor argument.

    Implementations are tried in the order of registration; the reference fits everywhere and comes last. Each choice
    is logged once per device type. The setting ``operations`` ("experts=reference,router=triton") restricts an
    operation to one implementation besides the reference.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self.reference = reference
        self._fast: list[_Fast] = []
        self._candidates: dict[str, list[_Candidate]] = {}
        self._logged: set[tuple[str, str]] = set()

    def add(
        self,
        label: str,
        fits: Callable[[torch.device], bool],
        call: Callable[..., Any],
        accepts: Callable[..., bool] | None = None,
        asked: bool = False,
    ) -> None:
        """Register a fast implementation.

        Args:
            label: what the log calls it, such as "triton".
            fits: whether it runs on a device.
            call: takes and returns what the reference does.
            accepts: whether it takes these arguments; None takes all.
            asked: it runs only where the setting names it.
        """
        self._fast.append((label, fits, accepts or _anything, call, asked))
        self._candidates.clear()

    def has_kernel(self, device: torch.device) -> bool:
        """Whether something faster than the reference may run on a device, for some arguments."""
        return bool(self.implementations(device))

    def implementations(self, device: torch.device) -> list[_Candidate]:
        """Label, whether it takes given arguments, and call of all but the reference, the first choice first."""
        candidates = self._candidates.get(device.type)
        if candidates is None:
            wanted = settings().wanted_operations.get(self.name)
            candidates = [
                (label, accepts, call)
                for label, fits, accepts, call, asked in self._fast
                if (not asked if wanted is None else wanted == label) and fits(device)
            ]
            self._candidates[device.type] = candidates
        return candidates

    def named(self, label: str, device: torch.device) -> _Candidate | None:
        """An implementation that runs on a device, whatever the setting says; None if there is none of that label."""
        found = (fast for fast in self._fast if fast[0] == label and fast[1](device))
        return next(((name, accepts, call) for name, _, accepts, call, _ in found), None)

    def choose(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[str, Callable[..., Any]]:
        """Label and implementation for these arguments."""
        device = first.device
        fitting = (
            (label, call) for label, accepts, call in self.implementations(device) if accepts(first, *args, **kwargs)
        )
        label, call = next(fitting, ("reference", self.reference))
        if (device.type, label) not in self._logged:
            self._logged.add((device.type, label))
            logger.info("%s on %s: %s", self.name, device.type, label)
        return label, call

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.choose(first, *args, **kwargs)[1](first, *args, **kwargs)


def _anything(*args: Any, **kwargs: Any) -> bool:
    return True


def runs_triton(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: any GPU, where Triton is installed."""
    return device.type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


def kernel(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that is imported at its first call: no machine needs Triton to import this package.

    Args:
        module: dotted path, such as "vllm_kimi_k3.ops.situ.triton".
        name: of the function.
    """

    @cache
    def load() -> Callable[..., Any]:
        return getattr(importlib.import_module(module), name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return call
