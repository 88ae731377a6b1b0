"""Time of every kernel on a GPU, at K3's sizes, against its reference and the limit that memory sets.

    python benchmarks/kernels.py [--json FILE] [--only NAME ...]

A call's time is that of a CUDA graph of many calls, replayed; each call of a graph works on other data (other
experts, other pages), so that weights come from memory and not from cache. "error" is against fp64.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gpu import oracle
from tests.gpu.oracle import BOUND, EPS, EXPERTS, HIDDEN, LATENT, TOP_K
from vllm_kimi_k3.ops.attn_res.reference import attn_res_norm_reference
from vllm_kimi_k3.ops.attn_res.triton import attn_res_norm as mix
from vllm_kimi_k3.ops.experts import triton as expert_kernels
from vllm_kimi_k3.ops.kda_step.triton import kda_decode_step, kda_verify_step
from vllm_kimi_k3.ops.router.triton import router, select
from vllm_kimi_k3.ops.situ.triton import situ

#: What an H200 moves, bytes a second, and its bf16 rate, FLOP a second, both measured.
BANDWIDTH, MATRIX_RATE = 4.3e12, 790e12
DTYPE = torch.bfloat16


@dataclass
class Row:
    """One measured case; times in microseconds."""

    operation: str
    case: str
    path: str
    time: float
    limit: float
    error: float | None = None


def clock(run: Callable[..., object], variants: list[dict[str, object]], replays: int = 20) -> float:
    """Microseconds a call of a graph that calls ``run`` with every one of ``variants``."""
    for variant in variants[:2]:
        run(**variant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for variant in variants:
            run(**variant)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1000 * start.elapsed_time(end) / (replays * len(variants))


def limit(moved: float, flops: float = 0.0) -> float:
    """Microseconds that bytes and FLOPs cost at least."""
    return 1e6 * max(moved / BANDWIDTH, flops / MATRIX_RATE)


def attn_res_rows() -> Iterator[Row]:
    for tokens in (1, 4, 16, 64, 1000, 8000):
        for seen in (1, 4, 8):
            given = [
                oracle.mix(tokens, DTYPE) | {"seen": seen, "snapshot": None, "eps": EPS, "out_eps": EPS}
                for _ in range(4)
            ]
            case, floor = f"{tokens} tokens, {seen} blocks", limit(2 * HIDDEN * tokens * (seen + 4))
            expected = oracle.mixed(given[0], seen)
            wrong = oracle.error(mix(**given[0]), expected)
            yield Row("attn_res_norm", case, "triton", clock(mix, given * 4), floor, wrong)
            if tokens in (1, 8000) and seen == 4:
                yield Row("attn_res_norm", case, "reference", clock(attn_res_norm_reference, given), floor)


def situ_rows() -> Iterator[Row]:
    for tokens in (1, 64, 8000):
        for inner in (768, 4224):
            given = [{"gate_up": oracle.normal(tokens, 2 * inner), "beta": 4.0, "linear_beta": 25.0} for _ in range(4)]
            floor = limit(6 * inner * tokens)
            time = clock(situ, given * 4)
            yield Row("situ", f"{tokens} tokens, {inner} wide", "triton", time, floor)


def router_rows() -> Iterator[Row]:
    weights = [oracle.normal(EXPERTS, HIDDEN) / 64 for _ in range(8)]
    rest = {"bias": torch.randn(EXPERTS, device="cuda") / 10, "top_k": TOP_K, "scale": 1.0}
    for tokens in (1, 4, 16, 64, 1000, 8000):
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        time = clock(select, [{"logits": logits} | rest] * 16)
        yield Row("select", f"{tokens} tokens", "triton", time, limit(4 * tokens * EXPERTS))
        given = [{"hidden": oracle.normal(tokens, HIDDEN), "weight": weight} | rest for weight in weights]
        floor = limit(2 * HIDDEN * (tokens + EXPERTS), 2.0 * tokens * HIDDEN * EXPERTS)
        time = clock(router, given)
        yield Row("router", f"{tokens} tokens", "triton", time, floor)


def kda_rows() -> Iterator[Row]:
    for heads in (12, 6):
        for sequences in (1, 4, 16, 64):
            pages = torch.randperm(8 * sequences, device="cuda").view(8, sequences)
            given = oracle.kda(sequences, heads, 128, DTYPE, 8 * sequences, 3)
            given |= {"lower_bound": BOUND, "eps": EPS}
            window, state = given["windows"][pages[0, 0]].clone(), given["states"][pages[0, 0]].clone()
            out = kda_decode_step(**given, pages=pages[0])
            wrong = oracle.error(out[:1], oracle.kda_sequence(given, slice(0, 1), window, state)[1])
            time = clock(kda_decode_step, [given | {"pages": row} for row in pages])
            floor = limit(sequences * heads * (8 * 128 * 128 + 2 * 128 * 24))
            yield Row("kda_decode_step", f"{sequences} sequences, {heads} heads", "triton", time, floor, wrong)
        for sequences in (1, 4, 16):
            given = oracle.kda(8 * sequences, heads, 128, DTYPE, 8 * sequences, 10)
            given |= {
                "slots": torch.arange(8 * sequences, device="cuda").view(-1, 8),
                "starts": 8 * torch.arange(sequences + 1, device="cuda"),
                "accepted": torch.full((sequences,), 3, device="cuda"),
                "lower_bound": BOUND,
                "eps": EPS,
            }
            time = clock(kda_verify_step, [given] * 8)
            floor = limit(sequences * heads * 4 * 128 * 128 * 9)
            yield Row("kda_verify_step", f"{sequences} x 8 tokens, {heads} heads", "triton", time, floor)


def expert_rows() -> Iterator[Row]:
    for inner in (384, 192):
        weights = oracle.expert_weights(inner)
        each = inner * LATENT * 3 / 2 * (1 + 1 / 16)
        for tokens in (1, 2, 4, 8, 16, 32, 64, 256, 1000, 8000):
            given = [
                oracle.routed(tokens, DTYPE) | weights | {"beta": 4.0, "linear_beta": 25.0}
                for _ in range(8 if tokens < 100 else 2)
            ]
            used = sum(one["ids"].unique().numel() for one in given) / len(given)
            floor = limit(used * each, 6.0 * tokens * TOP_K * inner * LATENT)
            expected = oracle.expert_sum(given[0], 4.0, 25.0) if tokens in (1, 16, 1000) else None
            paths = {"chosen": expert_kernels.experts}
            if tokens <= 16:
                paths |= {name: getattr(expert_kernels, name) for name in ("experts_by_pair", "experts_by_tile")}
            for name, run in paths.items():
                wrong = None if expected is None else oracle.error(run(**given[0]), expected)
                yield Row("experts", f"{tokens} tokens, {inner} rows", name, clock(run, given), floor, wrong)


ROWS = {
    "attn_res": attn_res_rows,
    "situ": situ_rows,
    "router": router_rows,
    "kda": kda_rows,
    "experts": expert_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--only", nargs="*", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'operation':18} {'case':30} {'path':16} {'us':>9} {'limit':>9} {'times':>6} {'error':>9}")
    rows = []
    for name in arguments.only:
        for row in ROWS[name]():
            rows.append(row)
            times = f"{row.time / row.limit:.1f}"
            wrong = "" if row.error is None else f"{row.error:9.1e}"
            figures = f"{row.time:9.2f} {row.limit:9.2f} {times:>6} {wrong:>9}"
            print(f"{row.operation:18} {row.case:30} {row.path:16} {figures}", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        head = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        arguments.json.write_text(json.dumps(head | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
