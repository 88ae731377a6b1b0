"""What the probes make of what the system prints."""

import pytest

from vllm_kimi_k3.plan.gpus import find
from vllm_kimi_k3.preflight.machine import described, parse_gpus, parse_topology, parse_version, probe

LISTING = """\
NVIDIA B300 SXM6 AC, 274120, 580.95.05, 10.3
NVIDIA B300 SXM6 AC, 274120, 580.95.05, 10.3
"""

NVLINK = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tPIX\t0-55
GPU1\tNV18\t X \tSYS\t0-55
NIC0\tPIX\tSYS\t X
"""


def test_nvidia_smi_rows() -> None:
    gpus, driver = parse_gpus(LISTING)
    assert [(gpu.name, gpu.architecture, gpu.memory) for gpu in gpus] == [("b300", "sm103", 274120 << 20)] * 2
    assert driver == (580, 95, 5)


def test_a_gpu_that_is_not_in_the_table_keeps_its_name() -> None:
    [gpu], _ = parse_gpus("NVIDIA GeForce RTX 4090, 24564, 570.1, 8.9")
    assert (gpu.name, gpu.architecture) == ("NVIDIA GeForce RTX 4090", "sm89")


@pytest.mark.parametrize(
    ("matrix", "linked"), [(NVLINK, True), (NVLINK.replace("NV18\t X", "PHB\t X"), False), ("", False)]
)
def test_topology(matrix: str, linked: bool) -> None:
    assert parse_topology(matrix) is linked


@pytest.mark.parametrize(
    ("text", "version"), [("2.28.9", (2, 28, 9)), ("13.0+cu", (13, 0)), ("580.95.05\n", (580, 95, 5)), ("none", None)]
)
def test_versions(text: str, version: tuple[int, ...] | None) -> None:
    assert parse_version(text) == version


def test_this_machine_can_be_probed() -> None:
    machine = probe()
    assert machine.real
    assert machine.memory and machine.memory > 1 << 30
    assert machine.packages is not None
    assert machine.packages["vllm-kimi-k3"]


def test_a_described_machine_claims_nothing_about_libraries() -> None:
    machine = described(find("b300"), 8)
    assert (machine.architecture, len(machine.gpus), machine.real) == ("sm103", 8, False)
    assert machine.nccl is machine.driver is machine.packages is None
