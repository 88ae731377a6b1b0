"""The vision tower and projector: the reference against the goldens, the fast one against the reference."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vllm_kimi_k3.model.vision import Grid, Projector, VisionTower
from vllm_kimi_k3.model.vision_share import deal, embed_images
from vllm_kimi_k3.nano.checkpoint import random_weights
from vllm_kimi_k3.nano.layout import vision_tensors
from vllm_kimi_k3.nano.shape import Shape, vision_config
from vllm_kimi_k3.reference import K3Config, KimiK3
from vllm_kimi_k3.vision_reference import VisionReference, position_embedding, rotary_angles, rotate

CASES = ["one_4x6", "two_10x6_8x8", "wide_2x14"]
STAGES = ["patch_embed_out", "block0_out", "block1_out", "encoder_out"]
#: fp32, as the goldens' README expects.
TOLERANCE = 2e-5


class Goldens:
    """The tiny tower of the goldens with its inputs and outputs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.whole: dict[str, Any] = json.loads((folder / "vision_tiny.config.json").read_text())
        self.config: dict[str, Any] = self.whole["vision_config"]
        self.weights = self.load("vision_tiny.weights")
        self.io = load_file(folder / "vision_tiny.io.safetensors")

    def load(self, name: str) -> dict[str, Tensor]:
        """A file's tensors, bf16 as fp32."""
        found = load_file(self.folder / f"{name}.safetensors")
        return {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in found.items()}

    def grids(self, case: str) -> list[Grid]:
        return [Grid(rows, columns) for _, rows, columns in self.io[f"{case}.grid_thw"].tolist()]

    def images(self, case: str) -> list[Tensor]:
        return list(self.io[f"{case}.pixel_values"].split([grid.patches for grid in self.grids(case)]))


@pytest.fixture(scope="module")
def goldens(shared: Path) -> Goldens:
    return Goldens(shared / "data" / "goldens")


@pytest.fixture(scope="module")
def engine() -> Iterator[None]:
    """What vLLM's encoder attention wants to stand in."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def fast(config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype) -> tuple[VisionTower, Projector]:
    """The vLLM modules with given weights."""
    fields = SimpleNamespace(**config)
    tower, projector = VisionTower(fields, "vision_tower"), Projector(fields)
    tower.load_state_dict({n.removeprefix("vision_tower."): w for n, w in weights.items() if n.startswith("vision")})
    projector.load_state_dict({n.removeprefix("mm_projector."): w for n, w in weights.items() if n.startswith("mm")})
    return tower.to(dtype), projector.to(dtype)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_agrees_with_the_goldens(goldens: Goldens, case: str) -> None:
    reference = VisionReference(goldens.config, goldens.weights, torch.float32)
    stages, projected = [], []
    for patches, grid in zip(goldens.images(case), goldens.grids(case), strict=True):
        stages.append(reference.encode(patches, *grid))
        projected.append(reference.project(stages[-1][-1], *grid))
    for name, found in zip(STAGES, zip(*stages, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(found), goldens.io[f"{case}.{name}"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(torch.cat(projected), goldens.io[f"{case}.projected"], atol=TOLERANCE, rtol=0)


def test_positions_agree_with_the_goldens(goldens: Goldens) -> None:
    io = goldens.io
    for size in ("2x144", "30x46", "64x64", "90x74"):
        found = position_embedding(io["posemb64.weight"].float(), *map(int, size.split("x")))
        torch.testing.assert_close(found, io[f"posemb64.out_{size}"], atol=1e-6, rtol=0)
    place = torch.arange(60)
    angles = rotary_angles(place // 10, place % 10, 128)
    torch.testing.assert_close(angles.cos(), io["rope128.cos"], atol=1e-6, rtol=0)
    torch.testing.assert_close(angles.sin(), io["rope128.sin"], atol=1e-6, rtol=0)
    torch.testing.assert_close(rotate(io["rope128.q_in"], angles), io["rope128.q_out"], atol=1e-5, rtol=0)
    far = rotary_angles(*io["rope128.far_hw"].unbind(1), 128)
    torch.testing.assert_close(far.cos(), io["rope128.far_cos"], atol=1e-5, rtol=0)
    torch.testing.assert_close(far.sin(), io["rope128.far_sin"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_the_fast_tower_agrees_with_the_goldens(goldens: Goldens, engine: None, case: str) -> None:
    tower, projector = fast(goldens.config, goldens.weights, torch.float32)
    grids = goldens.grids(case)
    with torch.no_grad():
        encoded = tower(goldens.io[f"{case}.pixel_values"], grids)
        projected = projector(encoded, grids)
    torch.testing.assert_close(encoded, goldens.io[f"{case}.encoder_out"], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(projected, goldens.io[f"{case}.projected"], atol=TOLERANCE, rtol=0)


def test_images_in_a_prompt_give_the_goldens_logits(goldens: Goldens) -> None:
    reference = VisionReference(goldens.config, goldens.weights, torch.float32)
    case, placeholder = "two_10x6_8x8", goldens.whole["media_placeholder_token_id"]
    images = zip(goldens.images(case), goldens.grids(case), strict=True)
    embeds = [reference.embed(patches, *grid) for patches, grid in images]
    text_config = json.loads((goldens.folder / goldens.whole["text"]).read_text())
    text = KimiK3(K3Config.from_dict(text_config), goldens.load("text_tiny.weights"), torch.float32)
    ids = goldens.io["mm.input_ids_expanded"]
    hidden = text.embed(ids).clone()
    hidden[ids == placeholder] = torch.cat(embeds)
    logits = text.logits(text.run(hidden).hidden)
    # A random text model magnifies what the embeddings may differ by.
    torch.testing.assert_close(logits, goldens.io["mm.logits"], atol=1e-3, rtol=0)


SHAPE = Shape()
MIXED = [Grid(2, 2), Grid(8, 8), Grid(10, 4), Grid(2, 40), Grid(6, 6)]


@pytest.fixture(scope="module")
def mixed() -> tuple[dict[str, Tensor], Tensor]:
    """Random weights of the miniature's tower, and the patches of the images in ``MIXED``."""
    generator = torch.Generator().manual_seed(3)
    weights = random_weights(SHAPE, vision_tensors(SHAPE), generator)
    total = sum(grid.patches for grid in MIXED)
    return weights, torch.randint(0, 256, (total, 3, 14, 14), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_images_of_many_sizes_in_one_pass_equal_one_by_one(
    engine: None, mixed: tuple[dict[str, Tensor], Tensor], ranks: int, dtype: torch.dtype
) -> None:
    weights, patches = mixed
    tower, projector = fast(vision_config(SHAPE), weights, dtype)
    reference = VisionReference(vision_config(SHAPE), weights, dtype)
    contributed: list[Tensor] = []

    def collect(mine: Tensor) -> Tensor:
        contributed.append(mine)
        return mine.repeat(ranks, 1)

    with torch.no_grad():
        for rank in range(ranks):
            embed_images(tower, projector, patches, MIXED, rank, ranks, collect)
        found = embed_images(tower, projector, patches, MIXED, 0, ranks, lambda _: torch.cat(contributed))
    images = patches.split([grid.patches for grid in MIXED])
    tolerance = 1e-5 if dtype == torch.float32 else 0.06
    for image, grid, embedding in zip(images, MIXED, found, strict=True):
        torch.testing.assert_close(embedding, reference.embed(image, *grid), atol=tolerance, rtol=0.05)


def test_every_image_is_dealt_once_and_the_load_is_even() -> None:
    costs = [5, 1, 9, 2, 2, 7, 3]
    shares = deal(costs, 3)
    assert sorted(item for share in shares for item in share) == list(range(7))
    assert max(sum(costs[item] for item in share) for share in shares) <= 10
    assert deal([4], 3) == [[0], [], []]
