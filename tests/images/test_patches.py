"""The processor against the goldens: sizes, tokens and the hash of every value."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
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
        assert digest(canvas.transpose(1, 2, 0)) == golden["padded_uint8_sha256"], (size, mode)
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
        expected = canvas[:, row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
        assert np.array_equal(patches[place], expected)


def blended(found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The rule in one line a step: RGBA [H, W, 4] over the chessboard."""
    height, width = found.shape[:2]
    odd = (np.arange(height)[:, None] // 8 + np.arange(width) // 8) % 2
    board = np.where(odd, np.float32(180), np.float32(255))[..., None]
    alpha = found[..., 3:].astype(np.float32) / np.float32(255)
    return (found[..., :3] * alpha + board * (1 - alpha)).astype(np.uint8)


def over(found: NDArray[np.uint8]) -> NDArray[np.uint8]:
    red, green, blue, alpha = np.ascontiguousarray(found.transpose(2, 0, 1))
    return np.stack(over_chessboard([red, green, blue], alpha), axis=-1)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (8, 8), (9, 17), (50, 70), (333, 41)])
def test_transparent_pixels_show_the_chessboard(width: int, height: int) -> None:
    clear = over(np.zeros((40, 20, 4), np.uint8))
    assert (clear[0, 0] == 255).all() and (clear[0, 8] == 180).all() and (clear[8, 0] == 180).all()
    found = np.random.default_rng(3).integers(0, 256, (height, width, 4), np.uint8)
    assert np.array_equal(over(found), blended(found))
    found[..., 3] = 255
    assert np.array_equal(over(found), found[..., :3])
    assert np.array_equal(blended(found), found[..., :3])


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_grey_is_the_same_in_all_planes(mode: str) -> None:
    grey = picture(61, 43, mode)
    assert np.array_equal(
        image_patches(grey, RULES)[0], image_patches(grey.convert({"L": "RGB", "LA": "RGBA"}[mode]), RULES)[0]
    )


@pytest.mark.parametrize("mode", ["P", "CMYK", "1", "YCbCr"])
def test_pixels_of_other_modes_become_rgb(mode: str) -> None:
    """Those of the offline API, which no file's decoding has brought to one of the usual modes."""
    given = picture(61, 43).convert(mode)
    assert np.array_equal(image_patches(given, RULES)[0], image_patches(given.convert("RGB"), RULES)[0])


def test_padding_is_black_and_at_the_end() -> None:
    canvas = padded(Image.new("RGB", (30, 5), (9, 9, 9)), RULES.fit(30, 5), RULES)
    assert canvas.shape == (3, 28, 56)
    assert (canvas[:, :5, :30] == 9).all() and canvas[:, 5:].sum() == canvas[..., 30:].sum() == 0
