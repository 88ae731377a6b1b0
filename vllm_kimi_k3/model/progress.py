"""How far loading is: bytes, rate and time left, on the first rank; a bar on a terminal, log lines elsewhere."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from math import prod

from torch import Tensor
from tqdm import tqdm

from vllm_kimi_k3.model.weights import Item

logger = logging.getLogger("vllm.vllm_kimi_k3.loading")

_GIB = 1 << 30
_SECONDS = 10.0


def planned_bytes(items: Iterable[Item]) -> int:
    """Bytes that a rank is going to read; the few fp32 tensors count as bf16, a share of 1e-5."""
    slots = [item.slot for item in items]
    return sum(prod(s.shape) // s.shape[s.dim] * s.length * (1 if s.quantised else 2) for s in slots)


def watched(
    tensors: Iterable[tuple[Item, Tensor]],
    total: int,
    log: Callable[[str], None] = logger.info,
    clock: Callable[[], float] = time.monotonic,
    terminal: bool | None = None,
) -> Iterator[tuple[Item, Tensor]]:
    """The same tensors, with reports of how far they are.

    Args:
        tensors: items with this rank's slices.
        total: bytes that are going to come.
        log: takes a line every ten seconds, and one at the end.
        clock: seconds.
        terminal: whether to draw a bar instead of all lines but the last; found out if None.
    """
    began = last = clock()
    done = 0
    terminal = sys.stderr.isatty() if terminal is None else terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading K3", disable=not terminal) as bar:
        for item, tensor in tensors:
            yield item, tensor
            size = tensor.numel() * tensor.element_size()
            done += size
            bar.update(size)
            now = clock()
            if not terminal and now - last >= _SECONDS:
                last = now
                rate = done / (now - began)
                log(
                    f"loading: {done / _GIB:.1f} of {total / _GIB:.1f} GiB ({done / total:.0%}), "
                    f"{rate / _GIB:.2f} GiB/s, {max(total - done, 0) / rate:.0f} s left"
                )
    seconds = max(clock() - began, 1e-9)
    log(f"loaded {done / _GIB:.2f} GiB in {seconds:.1f} s, {done / seconds / _GIB:.2f} GiB/s")
