"""The processor against the goldens: sizes, tokens and the hash of every value."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images.pictures import picture, pixels
from vllm_kimi_k3.images.chessboard import over_chessboard
from vllm_kimi_k3.images.patches import cut, image_patches, padded
from vllm_kimi_k3.images.rules import ImageRules
from vllm_kimi_k3.vision_reference import normalise

RULES = ImageRules()
#: More pixels than this cost seconds; of those images only sizes are compared.
LARGE = 2_000_000


@pytest.fixture(scope="module")
def goldens(shared: Path) -> dict[str, Any]:
    return json.loads((shared / "data" / "goldens" / "processor.json").read_text())


def digest(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def test_the_published_rules_are_the_defaults(goldens: dict[str, Any]) -> None:
    assert ImageRules.from_config(goldens) == RULES


def test_every_value_is_the_released_processors(goldens: dict[str, Any]) -> None:
    checked = 0
    for golden in goldens["images"]:
        size, mode = (golden["width"], golden["height"]), golden["mode"]
        fit = RULES.fit(*size)
        assert [1, fit.rows, fit.columns] == golden["grid_thw"], size
        assert (fit.width, fit.height) == (golden["new_width"], golden["new_height"]), size
        assert fit.tokens == golden["num_tokens"], size
        if size[0] * size[1] > LARGE:
            continue
        assert digest(pixels(*size, mode)) == golden["source_sha256"], "the test's formula is not the goldens'"
        canvas = padded(picture(*size, mode), fit, RULES)
        assert digest(canvas) == golden["padded_uint8_sha256"], (size, mode)
        patches = torch.from_numpy(cut(canvas, RULES.patch_size))
        assert digest(normalise(patches).numpy()) == golden["pixel_values_sha256"], (size, mode)
        checked += 1
    assert checked == 10


def test_patches_go_row_by_row() -> None:
    patches, fit = image_patches(picture(60, 40), RULES)
    canvas = padded(picture(60, 40), fit, RULES)
    assert (fit.rows, fit.columns) == (4, 6) and patches.shape == (24, 3, 14, 14)
    for place in (0, 1, 6, 23):
        row, column = divmod(place, 6)
        expected = canvas[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
        assert np.array_equal(patches[place], expected.transpose(2, 0, 1))


def test_transparent_pixels_show_the_chessboard() -> None:
    clear = over_chessboard(np.zeros((40, 20, 4), np.uint8))
    assert (clear[0, 0] == 255).all() and (clear[0, 8] == 180).all() and (clear[8, 0] == 180).all()
    assert (clear[39, 19] == (255 if (39 // 8 + 19 // 8) % 2 == 0 else 180)).all()
    solid = pixels(50, 70, "RGBA")
    solid[..., 3] = 255
    assert np.array_equal(over_chessboard(solid), solid[..., :3])


def test_padding_is_black_and_at_the_end() -> None:
    canvas = padded(Image.new("RGB", (30, 5), (9, 9, 9)), RULES.fit(30, 5), RULES)
    assert canvas.shape == (28, 56, 3)
    assert (canvas[:5, :30] == 9).all() and canvas[5:].sum() == canvas[:, 30:].sum() == 0
