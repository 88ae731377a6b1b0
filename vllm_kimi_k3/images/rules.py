"""How large an image is when the vision tower sees it, and how many tokens it takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np


class Fit(NamedTuple):
    """An image of any size in the tower's terms.

    ``width`` and ``height`` in pixels after the resize; ``rows`` and ``columns`` of patches once it is padded at the
    right and at the bottom; ``tokens`` that it takes in a prompt.
    """

    width: int
    height: int
    rows: int
    columns: int
    tokens: int


@dataclass(frozen=True)
class ImageRules:
    """The sizes in ``media_proc_cfg`` of a ``preprocessor_config.json``; the defaults are the published ones.

    Attributes:
        patch_size: pixels a side.
        merge_kernel_size: patches a side that become one token.
        in_patch_limit: patches of an image before padding, at most.
        patch_limit_on_one_side: patches along one side, at most.
    """

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ImageRules":
        """Read a ``preprocessor_config.json``.

        Raises:
            ValueError: the config asks for something that K3's published processor does not do.
        """
        given = config.get("media_proc_cfg", {})
        fixed = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "fixed_output_tokens": None}
        for name, value in fixed.items():
            if given.get(name, value) != value:
                raise ValueError(
                    f"preprocessor_config.json: media_proc_cfg.{name} is {given[name]!r}, K3's is {value!r}"
                )
        return cls(**{field.name: given[field.name] for field in fields(cls) if field.name in given})

    @property
    def token_size(self) -> int:
        """Pixels a side that one token stands for."""
        return self.patch_size * self.merge_kernel_size

    @property
    def longest_side(self) -> int:
        """Pixels along one side, at most, after the resize."""
        return self.patch_size * self.patch_limit_on_one_side

    def scale(self, width: int, height: int) -> float:
        """By how much an image of so many pixels is shrunk, at most 1."""
        patches = max(1, width // self.patch_size) * max(1, height // self.patch_size)
        limits = (math.sqrt(self.in_patch_limit / patches), self.longest_side / width, self.longest_side / height)
        return min(1.0, *limits)

    def fit(self, width: int, height: int) -> Fit:
        """What an image of so many pixels, 1 or more a side, becomes: the published rule."""
        scale = self.scale(width, height)
        new_width, new_height = (min(max(1, int(side * scale)), self.longest_side) for side in (width, height))
        rows, columns = (-(-side // self.token_size) * self.merge_kernel_size for side in (new_height, new_width))
        return Fit(new_width, new_height, rows, columns, rows * columns // self.merge_kernel_size**2)

    def largest(self, tokens: int) -> tuple[int, int]:
        """Width and height of an image that takes as many tokens as one can, but no more than ``tokens``, 1 or more.

        Padding takes images past ``in_patch_limit``, so the area does not tell, and all are tried. Of the images with
        the same whole patches, the one with the most left over takes the most tokens. Those more than twice as long as
        the limit have too many patches for what is left over to matter.
        """
        patches = np.arange(1, 2 * self.patch_limit_on_one_side + 1)
        side = (patches + 1) * self.patch_size - 1
        limit = self.longest_side / side
        scale = np.sqrt(self.in_patch_limit / (patches[:, None] * patches))
        scale = np.minimum(np.minimum(scale, 1), np.minimum(limit[:, None], limit))
        rows, columns = (
            -(-np.clip((scale * sides).astype(np.int64), 1, self.longest_side) // self.token_size)
            for sides in (side[:, None], side)
        )
        found = np.where(rows * columns <= tokens, rows * columns, 0)
        row, column = np.unravel_index(np.argmax(found), found.shape)
        return int(side[column]), int(side[row])
