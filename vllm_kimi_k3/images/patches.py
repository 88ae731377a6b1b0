"""From an image to its patches: resize, background, padding, cut."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vllm_kimi_k3.images.chessboard import over_chessboard
from vllm_kimi_k3.images.rules import Fit, ImageRules


def padded(image: Image.Image, fit: Fit, rules: ImageRules) -> NDArray[np.uint8]:
    """An image as the tower sees it: RGB [rows * patch, columns * patch, 3], black where it is padded.

    The resize is bicubic and runs in the image's own mode, as the released processor's does; so the colours of
    transparent pixels bleed into their neighbours only as far as those are transparent too.
    """
    if image.size != (fit.width, fit.height):
        image = image.resize((fit.width, fit.height), Image.Resampling.BICUBIC)
    if image.mode in ("RGBA", "LA"):
        pixels = over_chessboard(np.asarray(image.convert("RGBA")))
    else:
        pixels = np.asarray(image.convert("RGB"))
    canvas = np.zeros((fit.rows * rules.patch_size, fit.columns * rules.patch_size, 3), np.uint8)
    canvas[: fit.height, : fit.width] = pixels
    return canvas


def cut(pixels: NDArray[np.uint8], patch: int) -> NDArray[np.uint8]:
    """Patches [rows * columns, 3, patch, patch] of [rows * patch, columns * patch, 3], row by row."""
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    grid = pixels.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.ascontiguousarray(grid).reshape(rows * columns, 3, patch, patch)


def image_patches(image: Image.Image, rules: ImageRules) -> tuple[NDArray[np.uint8], Fit]:
    """Patches uint8 [L, 3, patch, patch] of an image, and how it was fitted.

    The values are not normalised: the tower does that, so that a fourth of the bytes travels to it.
    """
    fit = rules.fit(*image.size)
    return cut(padded(image, fit, rules), rules.patch_size), fit
