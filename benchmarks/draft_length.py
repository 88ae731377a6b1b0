"""The draft-length controller beside every fixed length, in a simulation.

    python -m benchmarks.draft_length [--requests N] [--length N] [--seed N]

A step of the simulated server costs what was measured of vLLM 0.33.0's own K3 on one H200 (TP8 slice, 24 layers): a
plain step, and a step that drafts and verifies 7; steps of other widths lie on the line between a draft pass and that.
Acceptance is that of published runs, as tokens a step with 7 drafts: short code 4.7, prose 2.6, prompts beyond 128 K
1.0. Reported is tokens a millisecond; the controller sees only what a server sees, times with 5 % of noise.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from vllm_kimi_k3.dspark.controller import DraftLength

MOST = 7
#: Batch to milliseconds of a plain step and of one that drafts and verifies 7 a request.
STEPS = {1: (3.71, 7.24), 4: (4.74, 13.4), 16: (8.33, 23.0)}
#: Milliseconds of the draft pass alone.
DRAFT = 0.6
#: Kind of request to tokens a step with 7 drafts.
KINDS = {"code": 4.7, "prose": 2.6, "128K": 1.0}


@cache
def acceptance(tokens: float) -> float:
    """Probability that a draft is accepted, one for all positions, at which 7 drafts give so many tokens a step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(MOST + 1)) < tokens else (low, middle)
    return low


def cost(batch: int, drafts: int) -> float:
    """Milliseconds of a step with so many drafts over all its requests."""
    plain, whole = STEPS[batch]
    if not drafts:
        return plain
    return plain + DRAFT + (whole - plain - DRAFT) * drafts / (MOST * batch)


@dataclass
class Server:
    """Serves requests of given kinds, ``batch`` at a time, each for ``length`` steps' worth of tokens.

    Attributes:
        batch: requests at a time, a key of :data:`STEPS`.
        kinds: of the requests, in their order.
        length: tokens of each answer.
        seed: of acceptance and noise.
    """

    batch: int
    kinds: Sequence[str]
    length: int
    seed: int

    def rate(self, fixed: int | None) -> float:
        """Tokens a millisecond with a fixed draft length, or with the controller's where it is None."""
        chance = random.Random(self.seed)
        controller = DraftLength(MOST)
        waiting = list(enumerate(self.kinds))[::-1]
        running: dict[str, tuple[str, int]] = {}
        elapsed, produced = 0.0, 0
        while waiting or running:
            while waiting and len(running) < self.batch:
                index, kind = waiting.pop()
                running[f"{kind} {index}"] = (kind, 0)
            if len(running) < self.batch:
                # The end of a run, at a batch of which nothing was measured.
                break
            names = list(running)
            lengths = controller.choose(names) if fixed is None else dict.fromkeys(names, fixed)
            total = sum(lengths.values())
            spent = cost(self.batch, total)
            elapsed += spent
            controller.times.observe(len(names) + total, bool(total), spent * chance.uniform(0.95, 1.05))
            for name in names:
                kind, done = running[name]
                accepted = 0
                while accepted < lengths[name] and chance.random() < acceptance(KINDS[kind]):
                    accepted += 1
                controller.observe(name, lengths[name], accepted)
                produced += 1 + accepted
                running[name] = (kind, done + 1 + accepted)
                if running[name][1] >= self.length:
                    del running[name]
                    controller.finish(name)
        return produced / elapsed


def mixes(requests: int, seed: int) -> dict[str, list[str]]:
    """Kinds of requests alone, and all of them mixed."""
    alone = {kind: [kind] * requests for kind in KINDS}
    return alone | {"mix": random.Random(seed).choices(list(KINDS), k=requests)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--length", type=int, default=1000, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    print(f"| batch, requests | {' | '.join(f'{n} drafts' for n in range(MOST + 1))} | controller | of best fixed |")
    print("|---|" + "---:|" * (MOST + 3))
    for batch in STEPS:
        for name, kinds in mixes(options.requests, options.seed).items():
            server = Server(batch, kinds, options.length, options.seed)
            fixed = [server.rate(length) for length in range(MOST + 1)]
            chosen = server.rate(None)
            figures = " | ".join(f"{rate:.3f}" for rate in fixed)
            print(f"| {batch}, {name} | {figures} | {chosen:.3f} | {chosen / max(fixed):.3f} |", flush=True)


if __name__ == "__main__":
    main()
