"""Token hit rate of this plugin's prefix cache and of vLLM's own align mode, at equal memory, over sizes of the pool.

    python -m benchmarks.prefix_cache [--quick] [--json FILE] [--svg FILE] [--traces agents chats] [--blocks N ...]

vLLM's real scheduler, coordinator and managers serve generated requests (``traces.py``) at K3's cache geometry at TP8
(``geometry.py``); no model runs. Both sides get the same requests in the same order and as many blocks, hash prompts in
128 tokens (for vLLM: ``--prefix-match-unit 128``, its finest for K3), and take steps of at most 8,192 tokens. The
rate is tokens found in the cache when a request is first scheduled, of all prompt tokens. "Unlimited" is what a
cache that keeps everything finds at this hash unit.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import vllm

from benchmarks.curve import as_svg
from benchmarks.geometry import BLOCK_BYTES, PAGE, UNIT, our_groups, vllm_groups
from benchmarks.simulator import Simulation, engine_config
from benchmarks.traces import Ask, agents, chats
from vllm_kimi_k3.cache.policy import Marks
from vllm_kimi_k3.nano.checkpoint import build

TRACES: dict[str, Callable[[int, Marks], list[Ask]]] = {"agents": agents, "chats": chats}
BLOCKS = (80, 100, 120, 150, 180, 220, 260, 300, 400)
REQUESTS, QUICK_REQUESTS = 400, 40
#: Requests that are served at a time.
WIDTH = 2


def rate(asks: Sequence[Ask], simulation: Simulation) -> float:
    """Serve the requests in order, each after the one that it follows; returns the token hit rate."""
    ids: list[str] = []
    queue = list(enumerate(asks))
    done = 0

    def waiting() -> int:
        return sum(not simulation.requests[name].is_finished() for name in ids[done:])

    while queue or waiting():
        while done < len(ids) and simulation.requests[ids[done]].is_finished():
            done += 1
        while queue and waiting() < WIDTH:
            _, ask = queue[0]
            if ask.after is not None and not simulation.requests[ids[ask.after]].is_finished():
                break
            queue.pop(0)
            ids.append(simulation.add(ask.prompt, ask.new).request_id)
        simulation.step()
    return sum(simulation.cached[name] for name in ids) / sum(len(ask.prompt) for ask in asks)


def ceiling(asks: Sequence[Ask]) -> float:
    """The rate of a cache that never forgets: the longest prefix of whole units that was seen before."""
    seen: set[int] = set()
    found = 0
    for ask in asks:
        tokens, chain, prefixes = ask.prompt + [1] * ask.new, 0, []
        for start in range(0, len(tokens) - UNIT + 1, UNIT):
            chain = hash((chain, tuple(tokens[start : start + UNIT])))
            prefixes.append(chain)
        usable = prefixes[: (len(ask.prompt) - 1) // UNIT]
        found += UNIT * next((index for index, prefix in enumerate(usable) if prefix not in seen), len(usable))
        seen.update(prefixes)
    return found / sum(len(ask.prompt) for ask in asks)


def simulation(config: Any, blocks: int, *, ours: bool) -> Simulation:
    """A pool of so many blocks, as the plugin or as vLLM's own K3 manages it."""
    groups = our_groups() if ours else vllm_groups()
    hashed = UNIT // 2 if ours else UNIT
    return Simulation(config, groups, blocks, hash_block=hashed, page=PAGE, ours=ours, check=False)


def curve(config: Any, asks: Sequence[Ask], blocks: Sequence[int]) -> list[dict[str, Any]]:
    """Hit rates of both sides at each size of the pool."""
    points = []
    for size in blocks:
        ours, theirs = (rate(asks, simulation(config, size, ours=side)) for side in (True, False))
        points.append({"blocks": size, "gib": round(size * BLOCK_BYTES / 2**30, 2), "ours": ours, "vllm": theirs})
        print(f"{size:5} blocks  ours {ours:.3f}  vLLM {theirs:.3f}  {ours / theirs:.2f}x", flush=True)
    return points


def measure(names: Sequence[str], blocks: Sequence[int], requests: int) -> dict[str, Any]:
    """The curves of the named traces, with what one needs to know about the run."""
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(build(Path(scratch) / "nano", seed=3), max_num_batched_tokens=8192, max_num_seqs=64)
    marks = Marks.of_vocabulary(config.model_config.get_vocab_size())
    curves = {}
    for name in names:
        asks = TRACES[name](requests, marks)
        mean = sum(len(ask.prompt) for ask in asks) / len(asks)
        print(f"{name}: {len(asks)} requests of {mean:,.0f} tokens on average")
        curves[name] = {
            "requests": len(asks),
            "mean_prompt": round(mean),
            "unlimited": ceiling(asks),
            "points": curve(config, asks, blocks),
        }
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "width": WIDTH,
        "curves": curves,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for name, trace in result["curves"].items():
        about = f"{trace['requests']} requests, {trace['mean_prompt']:,} tokens each"
        lines += [
            f"| {name}: {about} | GiB a rank | this plugin | vLLM's own | ratio |",
            "|---:|---:|---:|---:|---:|",
        ]
        for point in trace["points"]:
            ratio = point["ours"] / point["vllm"]
            figures = f"{point['gib']} | {point['ours']:.3f} | {point['vllm']:.3f} | {ratio:.2f}"
            lines.append(f"| {point['blocks']} blocks | {figures} |")
        lines += [f"| unlimited | | {trace['unlimited']:.3f} | | |", ""]
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests instead of {REQUESTS}")
    arguments.add_argument("--traces", nargs="+", choices=list(TRACES), default=list(TRACES))
    arguments.add_argument("--blocks", nargs="+", type=int, default=list(BLOCKS), help="sizes of the pool")
    arguments.add_argument("--json", type=Path, help="write the figures to this file")
    arguments.add_argument("--svg", type=Path, help="draw the curves into this file")
    options = arguments.parse_args()
    result = measure(options.traces, options.blocks, QUICK_REQUESTS if options.quick else REQUESTS)
    print(f"\n{result['date']}, Python {result['python']}, vLLM {result['vllm']}\n\n{table(result)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if options.svg:
        options.svg.write_text(as_svg(result["curves"]))


if __name__ == "__main__":
    main()
