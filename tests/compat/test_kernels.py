"""How sequences are cut for a kernel that gives out no state on its way."""

import pytest

from vllm_kimi_k3.compat.kernels import rounds


@pytest.mark.parametrize(
    ("starts", "exports", "expected"),
    [
        pytest.param([0, 5], [], [[(0, 0, 5, [7])]], id="whole"),
        pytest.param([0, 0, 5], [], [[(1, 0, 5, [8])]], id="an empty sequence"),
        pytest.param([0, 130], [(0, 64, 3)], [[(0, 0, 64, [3])], [(0, 64, 130, [7])]], id="one cut"),
        pytest.param([0, 64], [(0, 64, 3)], [[(0, 0, 64, [3, 7])]], id="a cut at the end"),
        pytest.param(
            [0, 1, 200],
            [(1, 64, 3), (1, 128, 4)],
            [[(0, 0, 1, [7]), (1, 1, 65, [3])], [(1, 65, 129, [4])], [(1, 129, 200, [8])]],
            id="two cuts of the second",
        ),
    ],
)
def test_parts_and_the_pages_of_their_states(
    starts: list[int], exports: list[tuple[int, int, int]], expected: list[list[tuple[int, int, int, list[int]]]]
) -> None:
    assert rounds(starts, [7, 8][: len(starts) - 1], exports) == expected
