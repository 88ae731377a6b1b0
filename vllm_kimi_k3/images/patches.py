"""From an image to its patches: resize, background, padding, cut."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vllm_kimi_k3.images.chessboard import over_chessboard
from vllm_kimi_k3.images.rules import Fit, ImageRules


def padded(image: Image.Image, fit: Fit, rules: ImageRules) -> NDArray[np.uint8]:
    """An image as the tower sees it: planes [3, rows * patch, columns * patch] of RGB, black where it is padded.

    The resize is bicubic and runs in the image's own mode, as the released processor's does; so the colours of
    transparent pixels bleed into their neighbours only as far as those are transparent too.
    """
    if image.size != (fit.width, fit.height):
        image = image.resize((fit.width, fit.height), Image.Resampling.BICUBIC)
    if image.mode not in ("RGB", "RGBA", "L", "LA"):
        image = image.convert("RGB")
    bands = [np.asarray(band) for band in image.split()]
    if image.mode in ("RGBA", "LA"):
        bands = over_chessboard(bands[:-1], bands[-1])
    # In planes, since a line of a patch is then one piece of memory. One band of grey fills all three.
    canvas = np.zeros((3, fit.rows * rules.patch_size, fit.columns * rules.patch_size), np.uint8)
    for plane, band in zip(canvas, bands if len(bands) == 3 else bands * 3, strict=True):
        plane[: fit.height, : fit.width] = band
    return canvas


def cut(planes: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """Patches [rows * columns, 3, patch, patch] of [3, rows * patch, columns * patch], row by row."""
    rows, columns = planes.shape[1] // patch, planes.shape[2] // patch
    # Whole lines of a patch are moved: twice as fast as bytes.
    lines = planes.view(np.dtype((np.void, patch))).reshape(3, rows, patch, columns)
    moved = np.ascontiguousarray(lines.transpose(1, 3, 0, 2))
    return moved.view(np.uint8).reshape(rows * columns, 3, patch, patch)


def image_patches(image: Image.Image, rules: ImageRules) -> tuple[NDArray[np.uint8], Fit]:
    """Patches uint8 [L, 3, patch, patch] of an image, and how it was fitted.

    The values are not normalised: the tower does that, so that a fourth of the bytes travels to it.
    """
    fit = rules.fit(*image.size)
    return cut(padded(image, fit, rules), rules.patch_size), fit
