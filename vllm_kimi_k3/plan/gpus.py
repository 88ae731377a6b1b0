"""Accelerators by name: memory, architecture, and how many share a node."""

import re
from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator.

    Attributes:
        name: lower case, as ``--gpu`` takes it.
        memory: bytes that the driver reports.
        architecture: "sm90", "gfx950", …; "cpu" for plain memory; "" where only a size was given.
        per_node: how many share a node, as they are sold.
    """

    name: str
    memory: int
    architecture: str
    per_node: int


def _gpu(name: str, gib: float, architecture: str, per_node: int = 8) -> Gpu:
    return Gpu(name, int(gib * GIB), architecture, per_node)


# What `nvidia-smi` and `rocm-smi` report as total, which is less than the name of a card promises.
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("h100", 79.6, "sm90"),
        _gpu("h20", 95.6, "sm90"),
        _gpu("h200", 139.8, "sm90"),
        _gpu("b200", 178.4, "sm100"),
        _gpu("gb200", 184.0, "sm100", 4),
        _gpu("b300", 267.7, "sm103"),
        _gpu("gb300", 276.6, "sm103", 4),
        _gpu("rtx-pro-6000", 94.9, "sm120"),
        _gpu("mi300x", 191.7, "gfx942"),
        _gpu("mi325x", 255.7, "gfx942"),
        _gpu("mi350x", 287.6, "gfx950"),
        _gpu("mi355x", 287.6, "gfx950"),
        _gpu("cpu", 16.0, "cpu", 1),
    )
}


def find(text: str) -> Gpu:
    """A GPU by name, or by its memory: ``"b300"``, ``"141GiB"``, ``"96 gb"``.

    Raises:
        ValueError: neither a known name nor a size.
    """
    name = text.strip().lower()
    if name in GPUS:
        return GPUS[name]
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gib|gb)", name)
    if not size:
        raise ValueError(f"--gpu {text!r}: expected one of {', '.join(GPUS)}, or a size such as 141GiB")
    return Gpu(text.strip(), int(float(size[1]) * (GIB if size[2] == "gib" else 10**9)), "", 8)


def by_device_name(device: str) -> Gpu | None:
    """The entry for a name as the driver gives it, ``"NVIDIA B300 SXM6 AC"``; None if it is not in the table."""
    words = re.sub(r"[^a-z0-9]+", " ", device.lower())
    spaced = f" {words} "
    known = sorted(GPUS, key=len, reverse=True)
    return next((GPUS[name] for name in known if f" {name.replace('-', ' ')} " in spaced), None)
