"""Training of the miniature's vision tower: ``python -m vllm_kimi_k3.nano.train_vision --out DIR``.

The text model stays as it is. The tower and projector learn to give it, for a picture, its own embeddings of a message
that asks to repeat what is seen: the eight tokens of a picture are the eight of ``Repeat this:`` and, say, ``3 red``. A
few minutes on one CPU core.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.images.patches import image_patches
from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.batches import load_tokenizer
from vllm_kimi_k3.nano.checkpoint import write
from vllm_kimi_k3.nano.layout import vision_tensors
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.nano.shape import Shape, vision_config
from vllm_kimi_k3.nano.start import starting_weights
from vllm_kimi_k3.nano.tasks.pictures import COLOURS, MOST, Picture, draw_picture
from vllm_kimi_k3.nano.train_draft import load_target
from vllm_kimi_k3.vision_reference import VisionReference


@dataclass(frozen=True)
class Plan:
    """What decides the result: ``steps`` of ``pictures`` each, the peak learning ``rate``, ``seed`` of everything."""

    steps: int = 5000
    pictures: int = 32
    rate: float = 2e-3
    seed: int = 1


class Vision(nn.Module):
    """Tower and projector with fp32 parameters.

    Args:
        weights: by published name.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.config = vision_config(shape)
        self.names = list(weights)
        # torch allows no dots in the name of a parameter.
        self.tensors = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(w) for name, w in weights.items()})

    def published(self) -> dict[str, Tensor]:
        """The parameters by published name."""
        return {name: self.tensors[name.replace(".", "/")] for name in self.names}

    def forward(self, pictures: list[Picture]) -> list[Tensor]:
        """The embeddings of each picture, [tokens, H]; those of one size go together."""
        # Rounded as the checkpoint will be, gradients straight through.
        weights = {name: w + (w.bfloat16().float() - w).detach() for name, w in self.published().items()}
        tower = VisionReference(self.config, weights, torch.float32)
        found: dict[int, Tensor] = {}
        for (rows, columns), group in by_grid(pictures).items():
            embedded = tower.embed(torch.stack(list(group.values())), rows, columns)
            found |= zip(group, embedded, strict=True)
        return [found[number] for number in range(len(pictures))]


def by_grid(pictures: list[Picture]) -> dict[tuple[int, int], dict[int, Tensor]]:
    """Rows and columns of patches to the patches of all pictures of that size, by their number in the list."""
    groups: dict[tuple[int, int], dict[int, Tensor]] = {}
    for number, picture in enumerate(pictures):
        patches, fit = image_patches(picture.image(), ImageRules())
        groups.setdefault((fit.rows, fit.columns), {})[number] = torch.from_numpy(patches)
    return groups


def steps(model: nn.Module, count: int, rate: float) -> Iterator[int]:
    """Numbers of steps; after each, the optimiser acts on the gradients. The rate warms up, then falls in a cosine."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(count):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * step / count))
        optimiser.zero_grad()
        yield step
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()


def read_as(tokenizer: K3Tokenizer, picture: Picture) -> list[int]:
    """The text tokens that a picture's tokens are to be read as, one each."""
    return tokenizer.encode(f"Repeat this: {picture.seen}")


def learn(vision: Vision, text: BatchedK3, plan: Plan) -> None:
    """Draw each token of a picture to the text model's embedding of the token that it is to be read as."""
    rng = random.Random(plan.seed)
    tokenizer = load_tokenizer()
    every = [Picture(colour, count, 0) for colour in COLOURS for count in range(1, MOST + 1)]
    pieces = sorted({piece for picture in every for piece in read_as(tokenizer, picture)})
    embeddings = text.embed(torch.tensor(pieces))
    for step in steps(vision, plan.steps, plan.rate):
        pictures = [draw_picture(rng) for _ in range(plan.pictures)]
        seen = torch.stack(vision(pictures))
        wanted = torch.tensor([[pieces.index(p) for p in read_as(tokenizer, picture)] for picture in pictures])
        scores = seen @ embeddings.T * embeddings.shape[1] ** -0.5
        loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten()) + F.mse_loss(seen, embeddings[wanted])
        loss.backward()
        if step % 50 == 0 or step + 1 == plan.steps:
            right = (scores.argmax(-1) == wanted).all(-1).float().mean()
            print(f"{step + 1}/{plan.steps} loss {loss:.3f} right {right:.2f}", flush=True)


def main() -> None:
    """Train, and write a checkpoint of the text model with the tower."""
    parser = argparse.ArgumentParser(prog="python -m vllm_kimi_k3.nano.train_vision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported checkpoint")
    parser.add_argument("--text", type=Path, help="checkpoint of the text model (default: the packaged one)")
    plan = Plan()
    for name in ("steps", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name))
    options = parser.parse_args()
    plan = Plan(steps=options.steps, seed=options.seed)

    begin = time.monotonic()
    shape = Shape()
    generator = torch.Generator().manual_seed(plan.seed)
    vision = Vision(shape, starting_weights(shape, vision_tensors(shape), generator))
    text = load_target(options.text or target_path(), torch.device("cpu"))
    learn(vision, text, plan)
    write(options.out, shape, text.published() | vision.published())
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
