"""The vision tower with its projector, beside vLLM's own K3 tower, on one device in one process.

    python benchmarks/vision.py [--quick] [--rounds 5] [--json FILE]

27 blocks of the published sizes, random weights, bf16, the same in both. A time is that of a whole pass, from patches
on the device to the embeddings of all images, the host's work included: the best of some rounds, the towers in turn.
Ours reads bytes and normalises them in the pass; vLLM's is given normalised patches. "error" is the norm of the
difference from the fp32 reference over the reference's norm, for images of at most 4,096 patches. `--quick` is a
tiny tower in fp32, for a machine without a GPU.
"""

import argparse
import gc
import importlib.util
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.vision_reference import VisionReference, normalise

PUBLISHED: dict[str, Any] = {
    "patch_size": 14,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": (2, 2),
    "vt_num_hidden_layers": 27,
    "vt_hidden_size": 1024,
    "vt_num_attention_heads": 12,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "text_hidden_size": 7168,
    "projector_ln_eps": 1e-5,
}
TINY = PUBLISHED | {
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
    "vt_num_hidden_layers": 2,
    "vt_hidden_size": 32,
    "vt_num_attention_heads": 2,
    "qkv_hidden_size": 48,
    "vt_intermediate_size": 64,
    "text_hidden_size": 40,
}
#: How many images, and their width and height.
CASES = [(1, 448, 448), (8, 448, 448), (64, 448, 448), (1, 1024, 768), (4, 1024, 768), (1, 3000, 2000)]
QUICK = [(1, 56, 56), (3, 84, 112)]
#: The reference holds the scores of all pairs of patches.
COMPARED = 4096

Grids = list[tuple[int, int]]
Run = Callable[[torch.Tensor, Grids], torch.Tensor]


@dataclass
class Row:
    """One tower on one case.

    Attributes:
        ms: milliseconds a pass.
        error: against the reference, see above.
        difference: the greatest from our tower's output, of values of about 1.
        fault: what ended the case, in place of figures.
    """

    case: str
    tower: str
    patches: int
    images: int
    ms: float | None = None
    error: float | None = None
    difference: float | None = None
    fault: str | None = None


def weights_of(config: dict[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights by published name, so large that every layer keeps the size of its input."""
    from vllm_kimi_k3.model.vision import Projector, VisionTower

    fields = SimpleNamespace(**config)
    with torch.device("meta"):
        parts = {"vision_tower": VisionTower(fields, "vision_tower"), "mm_projector": Projector(fields)}
    generator = torch.Generator(device).manual_seed(1)
    found = {}
    for part, module in parts.items():
        for name, parameter in module.named_parameters():
            value = torch.randn(parameter.shape, generator=generator, device=device)
            if "norm" in name:
                value = 1 + value / 10
            elif "pos_emb" not in name:
                value /= math.sqrt(value[0].numel())
            found[f"{part}.{name}"] = value.to(dtype)
    return found


def build_ours(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Run:
    """This plugin's tower and projector, from uint8 patches."""
    from vllm_kimi_k3.model.vision import Grid, Projector, VisionTower

    fields = SimpleNamespace(**config)
    with weights["mm_projector.post_norm.weight"].device:
        tower, projector = VisionTower(fields, "ours"), Projector(fields)
    fill({"vision_tower": tower, "mm_projector": projector}, weights)
    print(f"ours: attention by {tower.encoder.blocks[0].attend.attn_backend}", flush=True)

    def run(patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        own = [Grid(*grid) for grid in grids]
        return projector(tower(patches, own), own)

    return run


def build_theirs(config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Run:
    """vLLM's tower and projector, from normalised patches."""
    from vllm.model_executor.models import kimi_k25_vit as vit
    from vllm.transformers_utils.configs.kimi_k3 import KimiK3VisionConfig

    fields = KimiK3VisionConfig(**config)
    with weights["mm_projector.post_norm.weight"].device:
        tower = vit.MoonViT3dPretrainedModel(fields, prefix="theirs")
        projector = vit.KimiK25MultiModalProjector(fields, config["text_hidden_size"])
    names = {"mm_projector.proj.0.": "mm_projector.linear_1.", "mm_projector.proj.2.": "mm_projector.linear_2."}
    renamed = {}
    for name, value in weights.items():
        old = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(old, "") + name.removeprefix(old)] = value
    fill({"vision_tower": tower, "mm_projector": projector}, renamed)
    for module in [*tower.modules(), *projector.modules()]:
        if (method := getattr(module, "quant_method", None)) is not None:
            method.process_weights_after_loading(module)
    attention = tower.encoder.blocks[0].attn
    print(f"vllm: attention by {attention.attn_backend}, FlashAttention {attention._fa_version}", flush=True)

    def run(patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        counted = torch.tensor([(1, *grid) for grid in grids])
        return torch.cat(vit.vision_tower_forward(tower, patches, counted, projector, False))

    return run


def fill(modules: dict[str, torch.nn.Module], weights: dict[str, torch.Tensor]) -> None:
    """Copy weights into modules; every parameter must have one, and every weight a parameter."""
    parameters = {f"{part}.{name}": p for part, module in modules.items() for name, p in module.named_parameters()}
    if parameters.keys() != weights.keys():
        raise ValueError(f"other names: {sorted(parameters.keys() ^ weights.keys())[:6]}")
    for name, parameter in parameters.items():
        parameter.data.copy_(weights[name])


@contextmanager
def standing_in(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """What vLLM's layers want around them: a config, a group of one process, the dtype of new weights."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        init_distributed_environment(1, 0, f"file://{folder}/group", 0, backend)
        initialize_model_parallel(1, 1)
        try:
            with torch.inference_mode():
                yield
        finally:
            torch.set_default_dtype(before)


def clock(calls: dict[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds a call of each, the best of so many rounds of about a tenth of a second."""

    def seconds(call: Callable[[], object], count: int) -> float:
        wait(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        wait(device)
        return (time.perf_counter() - begin) / count

    for call in calls.values():
        seconds(call, 3)
    counts = {name: max(1, min(50, round(0.1 / seconds(call, 1)))) for name, call in calls.items()}
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], seconds(call, counts[name]))
    return {name: 1000 * value for name, value in best.items()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    case: tuple[int, int, int], towers: dict[str, Run], reference: VisionReference, device: torch.device, rounds: int
) -> list[Row]:
    """The rows of one case; a tower that fails has its fault in its row."""
    count, width, height = case
    fit = ImageRules().fit(width, height)
    grids = [(fit.rows, fit.columns)] * count
    size = fit.rows * fit.columns
    generator = torch.Generator(device).manual_seed(2)
    shape = (count * size, 3, 14, 14)
    patches = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    normal = normalise(patches).to(reference.weights["mm_projector.post_norm.weight"].dtype)
    given = {"ours": patches, "vllm": normal}
    rows = {name: Row(f"{count} x {width}x{height}", name, count * size, count) for name in towers}
    expected = None
    if size <= COMPARED:
        expected = torch.cat([reference.embed(image, fit.rows, fit.columns) for image in patches.split(size)])
    calls, outputs = {}, {}
    for name, run in towers.items():
        try:
            outputs[name] = run(given[name], grids).float()
            wait(device)
            calls[name] = lambda run=run, patches=given[name]: run(patches, grids)
            if expected is not None:
                rows[name].error = float((outputs[name] - expected).norm() / expected.norm())
            if "ours" in outputs and name != "ours":
                rows[name].difference = float((outputs[name] - outputs["ours"]).abs().max())
        except Exception as error:
            rows[name].fault = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    try:
        for name, ms in clock(calls, device, rounds).items():
            rows[name].ms = ms
    except Exception as error:
        for name in calls:
            rows[name].fault = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return list(rows.values())


def show(rows: list[Row]) -> None:
    """Print the rows of a case."""
    times = {row.tower: row.ms for row in rows}
    for row in rows:
        head = f"{row.case:18} {row.patches:8,} {row.tower:6}"
        if row.ms is None:
            print(f"{head} failed: {row.fault}", flush=True)
            continue
        rates = f"{row.ms:9.3f} {1000 * row.images / row.ms:9.1f} {row.patches / row.ms / 1000:9.3f}"
        ratio = f"{row.ms / times['ours']:.2f}" if times.get("ours") else ""
        error = "" if row.error is None else f"{row.error:.1e}"
        difference = "" if row.difference is None else f"{row.difference:.1e}"
        print(f"{head} {rates} {ratio:>6} {error:>9} {difference:>11}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny tower and small images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed, and both towers run its encoder attention")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        parser.error("no GPU here; --quick runs a tiny tower on the CPU")
    dtype = torch.float32 if arguments.quick else torch.bfloat16
    config, cases = (TINY, QUICK) if arguments.quick else (PUBLISHED, CASES)

    import vllm

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, vLLM {vllm.__version__}, {dtype}", flush=True)
    rows: list[Row] = []
    with standing_in(device, dtype):
        weights = weights_of(config, device, dtype)
        reference = VisionReference(config, weights, torch.float32)
        towers = {"ours": build_ours(config, weights)}
        try:
            towers["vllm"] = build_theirs(config, weights)
        except Exception as error:
            print(f"vLLM's own tower is not compared: {type(error).__name__}: {error}", flush=True)
        head = f"{'case':18} {'patches':>8} {'tower':6} {'ms':>9} {'images/s':>9} {'Mpatch/s':>9}"
        print(f"{head} {'times':>6} {'error':>9} {'difference':>11}")
        for case in cases:
            try:
                found = measure(case, towers, reference, device, arguments.rounds)
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
                continue
            show(found)
            rows += found
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if arguments.json:
        head = {"device": name, "torch": torch.__version__, "vllm": vllm.__version__, "dtype": str(dtype)}
        arguments.json.write_text(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
