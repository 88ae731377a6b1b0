"""Training of the miniature's vision tower: ``python -m vllm_kimi_k3.nano.train_vision --out DIR``.

The text model stays as it is. First the tower and projector learn to see: the tokens of a picture are drawn to that
model's own embeddings of the words for count and colour, in turn. Then they learn to be understood: the loss is the
text model's on its answers. Some ten minutes on two CPU cores.
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

from vllm_kimi_k3.images.patches import image_patches
from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.batches import load_tokenizer
from vllm_kimi_k3.nano.checkpoint import write
from vllm_kimi_k3.nano.dialogue import Dialogue, Encoder, append
from vllm_kimi_k3.nano.layout import vision_tensors
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.nano.shape import Shape, vision_config
from vllm_kimi_k3.nano.start import starting_weights
from vllm_kimi_k3.nano.tasks.exchange import Scene, Style
from vllm_kimi_k3.nano.tasks.pictures import COLOURS, MOST, Picture, draw_picture, look
from vllm_kimi_k3.nano.train_draft import load_target
from vllm_kimi_k3.vision_reference import VisionReference

# Prompts that name no effort are half as long, so most of the training is on those.
_EFFORTS = {"off": 3, "unset": 3, "low": 1, "high": 1, "max": 2}


@dataclass(frozen=True)
class Plan:
    """What decides the result: steps of ``see`` pictures, then steps of ``say`` dialogues; ``seed`` of everything."""

    see_steps: int = 1500
    see: int = 32
    say_steps: int = 250
    say: int = 8
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


def learn_to_see(vision: Vision, text: BatchedK3, plan: Plan) -> None:
    """Draw a picture's even tokens to the embedding of its count, the odd ones to that of its colour."""
    rng = random.Random(f"see {plan.seed}")
    tokenizer = load_tokenizer()
    words = [f" {count}" for count in range(1, MOST + 1)] + [f" {colour}" for colour in COLOURS]
    # A word of several pieces is known by its last one, which no other of these words shares.
    embeddings = text.embed(torch.tensor([tokenizer.encode(word)[-1] for word in words]))
    for step in steps(vision, plan.see_steps, plan.rate):
        pictures = [draw_picture(rng) for _ in range(plan.see)]
        tokens = vision(pictures)
        wanted = torch.cat([_wanted(picture, len(each)) for picture, each in zip(pictures, tokens, strict=True)])
        seen = torch.cat(tokens)
        scores = seen @ embeddings.T * embeddings.shape[1] ** -0.5
        loss = F.cross_entropy(scores, wanted) + F.mse_loss(seen, embeddings[wanted])
        loss.backward()
        if step % 50 == 0 or step + 1 == plan.see_steps:
            right = (scores.argmax(-1) == wanted).float().mean()
            print(f"see {step + 1}/{plan.see_steps} loss {loss:.3f} right {right:.2f}", flush=True)


def _wanted(picture: Picture, tokens: int) -> Tensor:
    """Which word each token of a picture stands for: the counts come first, then the colours."""
    words = [picture.count - 1, MOST + list(COLOURS).index(picture.colour)]
    return torch.tensor(words * tokens)[:tokens]


def learn_to_say(vision: Vision, text: BatchedK3, plan: Plan) -> None:
    """Train tower and projector on the text model's answers; the text model stays as it is."""
    rng = random.Random(f"say {plan.seed}")
    encoder = Encoder(load_tokenizer())
    text.requires_grad_(False)
    for step in steps(vision, plan.say_steps, plan.rate / 2):
        style = Style(rng.choices(list(_EFFORTS), list(_EFFORTS.values()))[0])
        loss = dialogue_loss(vision, text, encoder, [dialogue(rng, style) for _ in range(plan.say)])
        loss.backward()
        if step % 10 == 0 or step + 1 == plan.say_steps:
            print(f"say {step + 1}/{plan.say_steps} {style.effort} loss {loss:.4f}", flush=True)


def dialogue(rng: random.Random, style: Style) -> Dialogue:
    """One picture and the answer."""
    made = Dialogue([], [], style, [])
    append(made, look(Scene(rng, style)))
    return made


def dialogue_loss(vision: Vision, text: BatchedK3, encoder: Encoder, dialogues: list[Dialogue]) -> Tensor:
    """Mean cross-entropy of the assistant's tokens."""
    coded = [encoder.encode(each) for each in dialogues]
    length = max(len(ids) for ids, _ in coded)
    ids = torch.tensor([row + [0] * (length - len(row)) for row, _ in coded])
    mask = torch.tensor([row + [0] * (length - len(row)) for _, row in coded]).float()
    embedded = vision([picture for each in dialogues for picture in each.pictures])
    pads = (ids == encoder.special.media_pad).unsqueeze(-1)
    inputs = text.embed(ids).masked_scatter(pads, torch.cat(embedded))
    losses = text.losses(text.run(inputs).hidden, torch.roll(ids, -1, 1))
    weight = torch.roll(mask, -1, 1)
    weight[:, -1] = 0
    return (losses * weight).sum() / weight.sum()


def main() -> None:
    """Train, and write a checkpoint of the text model with the tower."""
    parser = argparse.ArgumentParser(prog="python -m vllm_kimi_k3.nano.train_vision", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory of the exported checkpoint")
    parser.add_argument("--text", type=Path, help="checkpoint of the text model (default: the packaged one)")
    plan = Plan()
    for name in ("see_steps", "say_steps", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(plan, name))
    options = parser.parse_args()
    plan = Plan(see_steps=options.see_steps, say_steps=options.say_steps, seed=options.seed)

    begin = time.monotonic()
    shape, source = Shape(), options.text or target_path()
    generator = torch.Generator().manual_seed(plan.seed)
    vision = Vision(shape, starting_weights(shape, vision_tensors(shape), generator))
    text = load_target(source, torch.device("cpu"))
    learn_to_see(vision, text, plan)
    learn_to_say(vision, text, plan)
    write(options.out, shape, text.published() | vision.published())
    print(f"{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
