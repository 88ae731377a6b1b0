"""What lies behind a transparent image: K3's chessboard of light squares."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: Pixels a side of a square; the square at the top left is white.
_SQUARE = 8
_WHITE, _GREY = np.float32(255), np.float32(180)


def over_chessboard(colours: Sequence[NDArray[np.uint8]], alpha: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Planes [H, W] of colours, as they look over the chessboard.

    Blended in fp32 and cut, not rounded, to whole values, as the released processor does. A row of squares at a time:
    few enough rows for the processor's cache, and the board is the same in each.
    """
    # Most images with an alpha plane, screenshots above all, do not use it.
    if (alpha == 255).all():
        return list(colours)
    odd = np.arange(alpha.shape[1]) // _SQUARE % 2 == 1
    boards = np.where(odd, _GREY, _WHITE), np.where(odd, _WHITE, _GREY)
    out = [np.empty_like(colour) for colour in colours]
    for top in range(0, alpha.shape[0], _SQUARE):
        rows = slice(top, top + _SQUARE)
        share = alpha[rows].astype(np.float32) / np.float32(255)
        board = boards[top // _SQUARE % 2] * (1 - share)
        for blended, colour in zip(out, colours, strict=True):
            np.add(colour[rows] * share, board, out=blended[rows], casting="unsafe")
    return out
