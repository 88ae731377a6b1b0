"""Time that the scheduler and the cache's managers take for a step, beside vLLM's own align mode.

    python -m benchmarks.manager [--json FILE] [--requests 256] [--steps N]

vLLM's real scheduler, coordinator and managers at K3's cache geometry at TP8 (``geometry.py``); no model runs. Timed is
``schedule()`` and ``update_from_output()`` of each step, on this thread's own clock. Both sides step in turns, so what
else the machine does meets both. "decode" is every request generating; in "mixed" one of them ends every few
steps and a prompt that shares its beginning with others takes its place.
"""

import argparse
import gc
import json
import platform
import random
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import Any

import vllm

from benchmarks.prefix_cache import simulation
from benchmarks.simulator import Simulation, engine_config
from vllm_kimi_k3.nano.checkpoint import build

REQUESTS, STEPS, WARMUP = 256, 600, 20
SHARED, OWN = 2_000, 600
SIDES = ("ours", "vllm")
#: Steps between two arrivals in the mixed case.
EVERY = 4
#: Blocks of the pool for each running request: its rows, its states, and as much again for what is kept.
BLOCKS_EACH = 32


class Load:
    """Keeps so many requests running on one side."""

    def __init__(self, side: Simulation, requests: int, steps: int, *, mixed: bool) -> None:
        self.side = side
        self.requests = requests
        self._random = random.Random(0)
        self._shared = [self._text(SHARED) for _ in range(8)]
        for index in range(requests):
            # In the mixed case they end one after the other, each a few steps after the one before.
            side.add(self._prompt(), EVERY * (index + 1) + WARMUP if mixed else steps + requests)
        while self.side.scheduler.waiting or any(self._prefills()):
            side.step()
        side.spent.clear()

    def step(self, *, arrival: bool) -> None:
        """One step; with an arrival, a further request comes first."""
        if arrival:
            self.side.add(self._prompt(), EVERY * self.requests)
        self.side.step()

    def _prefills(self) -> list[bool]:
        return [request.num_output_tokens == 0 for request in self.side.scheduler.running]

    def _prompt(self) -> list[int]:
        return self._random.choice(self._shared) + self._text(self._random.randrange(1, OWN))

    def _text(self, length: int) -> list[int]:
        return self._random.choices(range(20, 900), k=length)


def case(config: Any, requests: int, steps: int, *, mixed: bool) -> dict[str, dict[str, float]]:
    """Microseconds of a step, both sides in turns."""
    blocks = BLOCKS_EACH * requests
    loads = {
        side: Load(simulation(config, blocks, ours=side == "ours"), requests, steps, mixed=mixed) for side in SIDES
    }
    gc.collect()
    for step in range(WARMUP + steps):
        order = SIDES if step % 2 else SIDES[::-1]
        for side in order:
            loads[side].step(arrival=mixed and step >= WARMUP and step % EVERY == 0)
    return {
        side: {"median": 1e6 * median(load.side.spent[WARMUP:]), "mean": 1e6 * fmean(load.side.spent[WARMUP:])}
        for side, load in loads.items()
    }


def measure(requests: int, steps: int) -> dict[str, Any]:
    """Both cases, with what one needs to know about the run."""
    with tempfile.TemporaryDirectory() as scratch:
        config = engine_config(
            build(Path(scratch) / "nano", seed=3), max_num_batched_tokens=8192, max_num_seqs=requests
        )
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "requests": requests,
        "steps": steps,
        "cases": {
            "decode": case(config, requests, steps, mixed=False),
            "mixed": case(config, requests, steps, mixed=True),
        },
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        f"| {result['requests']} requests, µs a step | this plugin | vLLM's own | ratio |",
        "|---|---:|---:|---:|",
    ]
    for name, sides in result["cases"].items():
        for figure in ("median", "mean"):
            ours, theirs = sides["ours"][figure], sides["vllm"][figure]
            lines.append(f"| {name}, {figure} | {ours:,.0f} | {theirs:,.0f} | {ours / theirs:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="how many run at a time")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps that are timed")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    result = measure(options.requests, options.steps)
    print(f"{result['date']}, Python {result['python']}, vLLM {result['vllm']}\n\n{table(result)}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
