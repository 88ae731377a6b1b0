"""Training of the miniature's draft: ``python -m vllm_kimi_k3.nano.train_draft --target DIR --out DIR``.

The target runs frozen over generated dialogues. Blocks are cut at random tokens of the assistant's and learn what the
target would say next, as far as the dialogue goes on as the target would. The confidence head learns, beside it, which
guesses are right.
"""

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from vllm_kimi_k3.dspark.reference import DraftConfig, MlaDraft
from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.batches import Batch, load_tokenizer, stream
from vllm_kimi_k3.nano.draft import BLOCK, DraftShape, draft_config, starting_draft, write_draft
from vllm_kimi_k3.nano.draft_exam import examine
from vllm_kimi_k3.nano.optimiser import Optimiser
from vllm_kimi_k3.nano.shape import Shape, k3_config
from vllm_kimi_k3.reference import mxfp4_dequantise

STATE = "draft_state.pt"
# Context tokens for each block that is cut out of them.
_SPACING = 16


@dataclass(frozen=True)
class Plan:
    """What decides the result: ``steps`` batches of ``tokens`` tokens, each learned ``passes`` times with other blocks;
    peak learning ``rate``; ``seed`` of everything.
    """

    steps: int = 2000
    tokens: int = 65536
    passes: int = 2
    rate: float = 5e-3
    warmup: int = 30
    seed: int = 2

    def factor(self, step: int, progress: float) -> float:
        """Of the learning rate: up over the warm-up, level to 40 % of the ``progress`` 0 … 1, straight down to 0."""
        return min((step + 1) / self.warmup, 1.0, (1 - progress) / 0.6)


class Lesson(NamedTuple):
    """Blocks to learn from.

    ``anchors`` and their ``positions`` int64 [B, A]; ``labels`` int64 [B, A, N], what the target chooses after each
    slot; ``before`` int64 [B, A, N], the token on each slot's position; ``weight`` fp32 [B, A, N], 1 where the label
    counts.
    """

    anchors: Tensor
    positions: Tensor
    labels: Tensor
    before: Tensor
    weight: Tensor


def cut(ids: Tensor, mask: Tensor, chosen: Tensor, positions: Tensor, width: int) -> Lesson:
    """Blocks at ``positions`` int64 [B, A] of token ``ids`` int64 [B, T].

    A slot counts while all tokens from the anchor to the one it guesses are the assistant's (``mask`` [B, T]) and those
    before the guessed one are what the target would have ``chosen`` (int64 [B, T], the target's token after each).
    """
    size = ids.shape[1]
    places = positions.unsqueeze(-1) + torch.arange(width + 1, device=ids.device)
    inside = places < size
    places = places.clamp(max=size - 1)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, places.flatten(1)).unflatten(1, (-1, width + 1))

    tokens, own, labels = at(ids), at(mask) * inside, at(chosen)[..., :-1]
    followed = (tokens[..., 1:-1] == labels[..., :-1]).long().cumprod(-1)
    weight = own.cumprod(-1)[..., 1:] * F.pad(followed, (1, 0), value=1)
    return Lesson(tokens[..., 0], positions, labels, tokens[..., :-1], weight.float())


class DraftTraining:
    """A draft, its frozen target, and where they are in the plan.

    Args:
        plan: of the training.
        target: frozen.
    """

    def __init__(self, plan: Plan, target: BatchedK3) -> None:
        self.plan = plan
        self.target = target
        self.shape = DraftShape(target.shape)
        embeddings = target.get_parameter("language_model/model/embed_tokens/weight").detach()
        head = target.get_parameter("language_model/lm_head/weight").detach()
        self.device = head.device
        drawn = starting_draft(self.shape, embeddings, torch.Generator().manual_seed(plan.seed))
        self.module = nn.Module()
        for name, value in drawn.items():
            trained = name != "embed_tokens.weight"
            self.module.register_parameter(name.replace(".", "/"), nn.Parameter(value, requires_grad=trained))
        self.module.to(self.device)
        config = DraftConfig.from_dict(draft_config(self.shape))
        self.draft = MlaDraft(config, self.weights(), embeddings, head, target.dtype)
        self.optimiser = Optimiser(self.module, plan.rate)
        self.step = 0

    def weights(self) -> dict[str, Tensor]:
        """The parameters by published name."""
        return {name.replace("/", "."): value for name, value in self.module.named_parameters()}

    def learn(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """One batch, ``passes`` updates.

        Returns of the last: ``loss``, ``confidence`` (its loss), and ``accepted``, the mean number of guesses of a
        block that are right up to the first wrong one, the tokens before them given.
        """
        ids = torch.from_numpy(batch.ids.astype(np.int64)).to(self.device, non_blocking=True)
        mask = torch.from_numpy(batch.mask).to(self.device, non_blocking=True).long()
        with torch.no_grad():
            output = self.target(ids, taps=self.shape.target_layer_ids)
            chosen = self.target.logits(output.hidden).argmax(-1)
        report: dict[str, Tensor] = {}
        for turn in range(self.plan.passes):
            generator = torch.Generator(self.device).manual_seed(
                (self.plan.seed * 1_000_003 + self.step) * self.plan.passes + turn
            )
            # Rows with fewer tokens of the assistant's than blocks fill up with blocks that count nothing.
            positions = torch.multinomial(mask + 1e-6, max(1, ids.shape[1] // _SPACING), generator=generator)
            report = self._update(output.taps, cut(ids, mask, chosen, positions, BLOCK), progress)
        self.step += 1
        return report

    def _update(self, taps: list[Tensor], lesson: Lesson, progress: float) -> dict[str, Tensor]:
        draft = self.draft
        hidden = draft.blocks(draft.context(taps), lesson.anchors, lesson.positions, BLOCK)
        markov = draft.markov(lesson.before)
        logits = (draft.logits(hidden) + draft.bias(markov)).float()
        right = (logits.argmax(-1) == lesson.labels).float()
        total = lesson.weight.sum().clamp(min=1)
        losses = F.cross_entropy(logits.flatten(0, 2), lesson.labels.flatten(), reduction="none")
        loss = (losses.view_as(lesson.weight) * lesson.weight).sum() / total
        # The head learns from the draft and not the draft from the head.
        odds = draft.confidence(hidden.detach(), markov.detach())
        doubt = F.binary_cross_entropy_with_logits(odds, right, weight=lesson.weight, reduction="sum") / total
        (loss + doubt).backward()
        self.optimiser.step(self.plan.factor(self.step, progress))
        counted = lesson.weight[..., 0].sum().clamp(min=1)
        accepted = (right * lesson.weight).cumprod(-1).sum() / counted
        return {"loss": loss.detach(), "confidence": doubt.detach(), "accepted": accepted}

    def save(self, path: Path) -> None:
        """Write everything that a later run needs, whole or not at all."""
        partial = path.with_suffix(".partial")
        state = {"plan": asdict(self.plan), "step": self.step, "draft": self.module.state_dict()}
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
        self.module.load_state_dict(state["draft"])
        self.optimiser.restore(state["optimiser"])
        self.step = state["step"]


def load_target(path: Path, device: torch.device) -> BatchedK3:
    """The training twin of an exported miniature, without gradients; compiled and in bf16 on a GPU.

    Raises:
        ValueError: the checkpoint has other sizes than the miniature.
    """
    shape = Shape()
    if json.loads((path / "config.json").read_text()) != k3_config(shape):
        raise ValueError(f"{path}/config.json is not the miniature's: give a directory that nano.train wrote")
    stored = {name: value for file in sorted(path.glob("*.safetensors")) for name, value in load_file(file).items()}
    weights: dict[str, Tensor] = {}
    for name, value in stored.items():
        if name.endswith("_packed"):
            scale = stored[name.replace("_packed", "_scale")]
            weights[name.removesuffix("_packed")] = mxfp4_dequantise(value, scale, torch.float32)
        elif not name.endswith("_scale"):
            weights[name] = value.float()
    fast = device.type == "cuda"
    twin = BatchedK3(shape, weights, torch.bfloat16 if fast else torch.float32, compiled=fast)
    return twin.to(device).requires_grad_(False)


def run(training: DraftTraining, batches: Generator[Batch, None, None], state: Path, minutes: float) -> None:
    """Train to the plan's end or for ``minutes``, whichever comes first; the learning rate ends with either."""
    plan = training.plan
    begin = shown = saved = time.monotonic()
    for batch in batches:
        passed = (time.monotonic() - begin) / (60 * minutes)
        if passed >= 1:
            break
        report = training.learn(batch, max(training.step / plan.steps, passed))
        now = time.monotonic()
        if now - shown > 10 or training.step in (1, plan.steps):
            values = " ".join(f"{name} {float(value):.3f}" for name, value in report.items())
            bar = ("#" * int(20 * max(training.step / plan.steps, passed))).ljust(20, ".")
            print(f"[{bar}] {training.step}/{plan.steps} {values} {now - begin:.0f} s", flush=True)
            shown = now
        if now - saved > 60:
            training.save(state)
            saved = now
    training.save(state)


def main() -> None:
    """Train for a while or to the end of the plan, export, and measure."""
    plan = Plan()
    parser = argparse.ArgumentParser(prog="python -m vllm_kimi_k3.nano.train_draft", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="directory that nano.train exported to")
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported draft")
    parser.add_argument("--state", type=Path, help="directory of the state to resume from (default: OUT)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="train this long at most")
    parser.add_argument("--resume", action="store_true", help="go on from the state, if there is one")
    parser.add_argument("--exam", type=int, default=16, help="questions a row at the end (default 16)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="that make data")
    for name in ("steps", "tokens", "passes", "warmup", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    parser.add_argument("--rate", type=float, default=plan.rate, help="peak learning rate")
    options = parser.parse_args()
    plan = Plan(options.steps, options.tokens, options.passes, options.rate, options.warmup, options.seed)

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = options.state or options.out
    folder.mkdir(parents=True, exist_ok=True)
    training = DraftTraining(plan, load_target(options.target, device))
    if options.resume and (folder / STATE).exists():
        training.resume(folder / STATE)
    size = sum(value.numel() for name, value in training.weights().items() if name != "embed_tokens.weight")
    print(f"{size / 1e6:.2f} M parameters, step {training.step} of {plan.steps}, {device}", flush=True)
    if training.step < plan.steps:
        # The second half of a plan of twice the steps: the full mix of lengths from the start.
        ahead = plan.steps + training.step, 2 * plan.steps
        batches = stream(plan.seed, *ahead, plan.tokens, options.workers)
        with contextlib.closing(batches):
            run(training, batches, folder / STATE, options.minutes)
    write_draft(options.out, training.shape, training.weights())
    if options.exam:
        print(examine(training.target, training.draft, load_tokenizer(), options.exam, plan.tokens), flush=True)


if __name__ == "__main__":
    main()
