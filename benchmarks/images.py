"""The image processor beside Pillow alone: ``python -m benchmarks.images``.

For each size: milliseconds of a PNG's decoding, of Pillow's resize (where there is one), and of the whole processor
from pixels to patches. The best of several rounds, on one thread.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO

import numpy as np
from PIL import Image

from vllm_kimi_k3.images.decode import decode
from vllm_kimi_k3.images.patches import image_patches
from vllm_kimi_k3.images.rules import ImageRules

CASES = [
    *[(448, 448, "RGB"), (1024, 768, "RGB"), (1024, 768, "RGBA"), (3000, 2000, "RGB"), (3000, 2000, "RGBA")],
    (5000, 4000, "RGB"),
]
RULES = ImageRules()


def picture(width: int, height: int, mode: str) -> Image.Image:
    """A gradient with a little noise."""
    noise = np.random.default_rng(1).integers(0, 8, (height, width, len(mode)))
    slope = np.linspace(0, 240, width)[None, :, None]
    return Image.fromarray((slope + noise).astype(np.uint8))


def best(rounds: int, call: Callable[[], object]) -> float:
    """Milliseconds of the fastest round."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def pillow(image: Image.Image) -> np.ndarray:
    """What Pillow and numpy alone need: the resize, RGB, an array."""
    fit = RULES.fit(*image.size)
    resized = image
    if image.size != (fit.width, fit.height):
        resized = image.resize((fit.width, fit.height), Image.Resampling.BICUBIC)
    return np.array(resized.convert("RGB"))


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print("| image | tokens | decode PNG, ms | Pillow alone, ms | processor, ms |\n|---|---|---|---|---|")
    for width, height, mode in CASES:
        image = picture(width, height, mode)
        buffer = BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        read = best(rounds, partial(decode, buffer.getvalue(), RULES, 1 << 30))
        alone = best(rounds, partial(pillow, image))
        ours = best(rounds, partial(image_patches, image, RULES))
        tokens = RULES.fit(width, height).tokens
        print(f"| {width}×{height} {mode} | {tokens:,} | {read:.1f} | {alone:.1f} | {ours:.1f} |")


if __name__ == "__main__":
    main()
