"""Token counts against the published rule, restated here in exact arithmetic."""

import json
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_k3.images.rules import ImageRules

RULES = ImageRules()


def published(width: int, height: int) -> tuple[int, int, int]:
    """New width, new height and tokens, with integers and fractions only.

    ``floor(side * sqrt(n / p))`` is ``isqrt(side^2 n / p)``, so no rounding of floats is involved.
    """
    patches = max(1, width // 14) * max(1, height // 14)
    by_side = min(Fraction(1), Fraction(7168, width), Fraction(7168, height))

    def shrunk(side: int) -> int:
        by_area = math.isqrt(side * side * 65536 // patches)
        return min(max(1, min(math.floor(side * by_side), by_area)), 7168)

    new_width, new_height = shrunk(width), shrunk(height)
    return new_width, new_height, -(-new_width // 28) * -(-new_height // 28)


def test_tokens_of_a_random_sample_of_sizes() -> None:
    draw = random.Random(6)
    sizes = [(draw.randint(1, 4000), draw.randint(1, 4000)) for _ in range(1600)]
    sizes += [(draw.randint(1, 60), draw.randint(1, 4000)) for _ in range(200)]
    sizes += [(28 * draw.randint(1, 142) + draw.randint(-1, 1), 28 * draw.randint(1, 142)) for _ in range(200)]
    for width, height in sizes:
        fit = RULES.fit(width, height)
        assert (fit.width, fit.height, fit.tokens) == published(width, height), (width, height)
        assert fit.rows % 2 == fit.columns % 2 == 0 and fit.rows * fit.columns == 4 * fit.tokens
        assert 0 <= fit.rows * 14 - fit.height < 28 and 0 <= fit.columns * 14 - fit.width < 28


def test_no_image_takes_more_tokens_than_the_largest(shared: Path) -> None:
    golden: dict[str, Any] = json.loads((shared / "data" / "goldens" / "processor.json").read_text())
    most = golden["largest"][0]["num_tokens"]
    assert RULES.fit(*RULES.largest(1 << 20)).tokens == most
    draw = random.Random(7)
    assert all(RULES.fit(draw.randint(1, 20000), draw.randint(1, 20000)).tokens <= most for _ in range(5000))


@pytest.mark.parametrize("limit", [1, 7, 100, 4096, 8192, 16384])
def test_the_largest_within_a_limit(limit: int) -> None:
    assert 0.9 * limit <= RULES.fit(*RULES.largest(limit)).tokens <= limit


def test_a_config_that_is_not_k3s_is_refused() -> None:
    assert ImageRules.from_config({}) == RULES
    assert ImageRules.from_config({"media_proc_cfg": {"in_patch_limit": 400, "sample_fps": 8}}).in_patch_limit == 400
    with pytest.raises(ValueError, match=r"media_proc_cfg\.image_mean is"):
        ImageRules.from_config({"media_proc_cfg": {"image_mean": [0.4, 0.5, 0.5]}})
