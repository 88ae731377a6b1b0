"""Training of the miniature: ``python -m vllm_kimi_k3.nano.train --out DIR``.

Every number that shapes the result is in :class:`Plan`; with the same plan, hardware and library versions the training
is the same. It can stop at any step and go on later (``--minutes``, ``--resume``).
"""

import argparse
import contextlib
import math
import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.batches import Batch, load_tokenizer, stream
from vllm_kimi_k3.nano.checkpoint import write
from vllm_kimi_k3.nano.decode import mark
from vllm_kimi_k3.nano.exam import TARGETS, questions
from vllm_kimi_k3.nano.layout import text_tensors
from vllm_kimi_k3.nano.optimiser import Optimiser, balance
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.nano.start import starting_weights

STATE = "state.pt"
# Tokens whose router scores set the balance of a step.
_BALANCE_SAMPLE = 8192


@dataclass(frozen=True)
class Plan:
    """What decides the result: ``steps`` steps of ``tokens`` tokens, peak learning ``rate``, ``seed`` of everything."""

    steps: int = 7000
    tokens: int = 65536
    rate: float = 6e-3
    warmup: int = 100
    seed: int = 1

    def factor(self, step: int) -> float:
        """Of the learning rate: up over the warm-up, level to 40 %, then straight down to nothing."""
        return min((step + 1) / self.warmup, 1.0, (self.steps - step) / (0.6 * self.steps))


class Training:
    """A model, its optimiser and where they are in the plan.

    Args:
        plan: of the training.
        device: where to train.
        weights: to start from, by published name; by default drawn from the plan's seed.
    """

    def __init__(self, plan: Plan, device: torch.device, weights: dict[str, Tensor] | None = None) -> None:
        self.plan = plan
        self.shape = Shape()
        self.device = device
        fast = device.type == "cuda"
        if weights is None:
            generator = torch.Generator().manual_seed(plan.seed)
            weights = starting_weights(self.shape, text_tensors(self.shape), generator)
        dtype = torch.bfloat16 if fast else torch.float32
        self.model = BatchedK3(self.shape, weights, dtype, compiled=fast).to(device)
        self.optimiser = Optimiser(self.model, plan.rate)
        self.step = 0

    def learn(self, batch: Batch) -> dict[str, Tensor]:
        """One step.

        Returns ``loss``, ``norm`` of the gradient, and ``load``, the heaviest of an expert over the fair one.
        """
        ids = torch.from_numpy(batch.ids.astype(np.int64)).to(self.device, non_blocking=True)
        mask = torch.from_numpy(batch.mask).to(self.device, non_blocking=True).float()
        targets, weight = torch.roll(ids, -1, 1), torch.roll(mask, -1, 1)
        weight[:, -1] = 0
        output = self.model(ids)
        losses = self.model.losses(output.hidden, targets)
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        norm = self.optimiser.step(self.plan.factor(self.step))
        scores = output.scores.detach()[:, *self._sample(batch)]
        load = balance(self.model, scores)
        self.step += 1
        return {"loss": loss.detach(), "norm": norm, "load": load.max()}

    def _sample(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Rows and columns of tokens that are not padding."""
        rng = np.random.default_rng(self.plan.seed * 1_000_003 + self.step)
        size = min(_BALANCE_SAMPLE, batch.ids.size)
        rows = rng.choice(len(batch.lengths), size, p=batch.lengths / batch.lengths.sum())
        columns = (rng.random(size) * batch.lengths[rows]).astype(np.int64)
        return torch.from_numpy(rows).to(self.device), torch.from_numpy(columns).to(self.device)

    def save(self, path: Path) -> None:
        """Write everything that a later run needs, whole or not at all."""
        partial = path.with_suffix(".partial")
        state = {"plan": asdict(self.plan), "step": self.step, "model": self.model.state_dict()}
        torch.save(state | {"optimiser": self.optimiser.state()}, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Go on from :meth:`save`; only the number of steps may have changed.

        Raises:
            ValueError: the state belongs to another plan.
        """
        state = torch.load(path, map_location=self.device, weights_only=False)
        if state["plan"] | {"steps": self.plan.steps} != asdict(self.plan):
            raise ValueError(f"{path} belongs to {state['plan']}, asked for is {self.plan}: give the same options")
        self.model.load_state_dict(state["model"])
        self.optimiser.restore(state["optimiser"])
        self.step = state["step"]

    def export(self, out: Path) -> None:
        """Write the checkpoint in the published layout."""
        write(out, self.shape, self.model.published())


def examine(training: Training, count: int) -> str:
    """A line a row of the exam, and under it a reply that did not count."""
    tokenizer = load_tokenizer()
    lines = []
    for row, (least, most) in TARGETS.items():
        if row == "pictures":
            # The text model alone sees none; they are for `train_vision`.
            continue
        begin = time.monotonic()
        marked = mark(training.model, tokenizer, questions(row, count, seed=0), training.plan.tokens)
        good = sum(ok for _, _, ok in marked)
        seconds = time.monotonic() - begin
        lines.append(f"{row:28} {good:4}/{len(marked)}  wanted {least:.1%} to {most:.0%}  {seconds:.0f} s")
        wrong = [(question.expected, reply) for question, reply, ok in marked if not ok]
        lines += [f"    wanted {expected}\n    got    {reply}" for expected, reply in wrong[:1]]
    return "\n".join(lines)


def run(training: Training, batches: Generator[Batch, None, None], state: Path, until: float) -> None:
    """Train until the plan's end or ``until`` (of ``time.monotonic``); saves every two minutes and at the end."""
    plan = training.plan
    begin = shown = saved = time.monotonic()
    first = last = training.step
    for batch in batches:
        report = training.learn(batch)
        now = time.monotonic()
        if now - shown > 10 or training.step in (1, 10, plan.steps):
            loss, norm, load = (float(report[name]) for name in ("loss", "norm", "load"))
            now = time.monotonic()
            speed = (training.step - last) * plan.tokens / (now - shown)
            bar = ("#" * (20 * training.step // plan.steps)).ljust(20, ".")
            print(
                f"[{bar}] {training.step}/{plan.steps} length {batch.ids.shape[1]} loss {loss:.4f} norm {norm:.2f} "
                f"load {load:.2f} {speed / 1e3:.0f}k tokens/s {now - begin:.0f} s",
                flush=True,
            )
            shown, last = now, training.step
        if now > until:
            break
        if now - saved > 120:
            training.save(state)
            saved = now
    training.save(state)
    print(f"{training.step - first} steps in {time.monotonic() - begin:.0f} s", flush=True)


def main() -> None:
    """Train for a while or to the end of the plan, then export and examine."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m vllm_kimi_k3.nano.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported checkpoint")
    parser.add_argument("--state", type=Path, help="directory of the state to resume from (default: OUT)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="train this long at most")
    parser.add_argument("--resume", action="store_true", help="go on from the state, if there is one")
    parser.add_argument("--exam", type=int, default=32, help="questions a row at the end (default 32)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make data")
    for name in ("steps", "tokens", "warmup", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    parser.add_argument("--rate", type=float, default=plan.rate, help="peak learning rate")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    plan = Plan(options.steps, options.tokens, options.rate, options.warmup, options.seed)

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = options.state or options.out
    folder.mkdir(parents=True, exist_ok=True)
    training = Training(plan, device)
    if options.resume and (folder / STATE).exists():
        training.resume(folder / STATE)
    size = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"{size / 1e6:.2f} M parameters, step {training.step} of {plan.steps}, {device}", flush=True)
    if training.step < plan.steps:
        batches = stream(plan.seed, training.step, plan.steps, plan.tokens, options.workers)
        with contextlib.closing(batches):
            run(training, batches, folder / STATE, until)
    training.export(options.out)
    if options.exam:
        print(examine(training, options.exam), flush=True)


if __name__ == "__main__":
    main()
