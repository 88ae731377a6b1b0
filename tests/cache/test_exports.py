"""Which states a step leaves, read off block tables."""

import pytest

from vllm_kimi_k3.cache.exports import step_exports


@pytest.mark.parametrize(
    ("row", "length", "new", "exports"),
    [
        ([0, 5, 0, 7], 512, 512, [(0, 256, 5)]),
        ([4, 5, 6, 7], 512, 512, [(0, 128, 4), (0, 256, 5), (0, 384, 6)]),
        ([4, 5, 6, 7], 500, 244, [(0, 128, 6)]),
        ([4, 5], 129, 129, [(0, 128, 4)]),
        ([4], 128, 128, []),
        ([0, 9, 8], 300, 100, [(0, 56, 9)]),
        ([3, 9], 256, 128, []),
    ],
    ids=[
        "the one wanted",
        "every interior column, not the running one",
        "columns before the step are left alone",
        "one past a unit",
        "ends on its only unit",
        "starts off the grid",
        "starts and ends on units",
    ],
)
def test_step_exports(row: list[int], length: int, new: int, exports: list[tuple[int, int, int]]) -> None:
    assert step_exports([row], [length], [new], 128) == exports


def test_sequences_are_numbered() -> None:
    assert step_exports([[0, 3], [5, 4]], [200, 200], [200, 200], 128) == [(1, 128, 5)]
