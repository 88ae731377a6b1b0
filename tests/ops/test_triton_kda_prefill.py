"""The kernel that walks over the states of a chunked prefill, against the recurrence."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.kda.reference import kda_prefill_reference, log_decay
from vllm_kimi_k3.ops.kda.triton import kda_prefill

BOUND, PAGES = -5.0, 24


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 32)])
@pytest.mark.parametrize("lengths", [[1], [16], [65], [0, 33, 0], [5, 80]], ids=str)
def test_prefill(heads: int, dim: int, lengths: list[int]) -> None:
    torch.manual_seed(0)
    tokens = sum(lengths)
    given = {name: torch.randn(tokens, heads, dim, device=DEVICE) for name in ("q", "k", "v")} | {
        "gate": 4 * torch.randn(tokens, heads, dim, device=DEVICE),
        "beta": torch.randn(tokens, heads, device=DEVICE),
        "a_log": 2 * torch.rand(heads, device=DEVICE),
        "dt_bias": 2 * torch.randn(heads * dim, device=DEVICE),
    }
    if tokens > 16:
        assert log_decay(given["gate"], given["a_log"], given["dt_bias"], BOUND).min() < -4.9
    states = torch.randn(PAGES, heads, dim, dim, device=DEVICE)
    expected_states = states.clone()
    last = len(lengths) - 1
    where = {
        "starts": [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        "pages": [3 * i for i in range(len(lengths))],
        "fresh": [i == 1 for i in range(len(lengths))],
        "exports": [(last, count, 20 + i) for i, count in enumerate((1, 16, 64)) if count <= lengths[last]],
        "lower_bound": BOUND,
    }
    expected = kda_prefill_reference(**given, **where, states=expected_states)
    torch.testing.assert_close(kda_prefill(**given, **where, states=states), expected, **CLOSE)
    torch.testing.assert_close(states, expected_states, **CLOSE)
