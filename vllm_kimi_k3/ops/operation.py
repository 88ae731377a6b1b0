"""One operation with its implementations, and which of them runs where."""

import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger("vllm.vllm_kimi_k3.ops")


class Operation:
    """A callable that runs the first fitting implementation on the device of its first tensor argument.

    Implementations are tried in the order of registration; the reference fits everywhere and comes last. The choice
    is made once per device type and logged once.
    """

    def __init__(self, name: str, reference: Callable[..., Any]) -> None:
        self.name = name
        self.reference = reference
        self._fast: list[tuple[str, Callable[[torch.device], bool], Callable[..., Any]]] = []
        self._chosen: dict[str, Callable[..., Any]] = {}

    def add(self, label: str, fits: Callable[[torch.device], bool], call: Callable[..., Any]) -> None:
        """Register a fast implementation.

        Args:
            label: what the log calls it, such as "triton".
            fits: whether it runs on a device.
            call: takes and returns what the reference does.
        """
        self._fast.append((label, fits, call))
        self._chosen.clear()

    def on(self, device: torch.device) -> Callable[..., Any]:
        """The implementation for a device."""
        chosen = self._chosen.get(device.type)
        if chosen is None:
            label, chosen = "reference", self.reference
            for candidate, fits, call in self._fast:
                if fits(device):
                    label, chosen = candidate, call
                    break
            self._chosen[device.type] = chosen
            logger.debug("%s on %s: %s", self.name, device.type, label)
        return chosen

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.on(first.device)(first, *args, **kwargs)
