"""The convolution kernel of prefills against its reference."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.short_conv.reference import short_conv_prefill_reference
from vllm_kimi_k3.ops.short_conv.triton import short_conv_prefill

PAGES = 12


@pytest.mark.parametrize("channel_first", [False, True])
@pytest.mark.parametrize("lengths", [[1], [2, 3, 40], [0, 17, 1]], ids=str)
def test_prefill(lengths: list[int], channel_first: bool) -> None:
    torch.manual_seed(0)
    channels, tokens = 150, sum(lengths)
    x = torch.randn(tokens, 2 * channels, device=DEVICE)[:, channels:]
    weight = torch.randn(channels, 4, device=DEVICE)
    windows = torch.randn(PAGES, 5, channels, device=DEVICE)
    if channel_first:
        windows = windows.transpose(1, 2).contiguous().transpose(1, 2)
    expected_windows = windows.clone()
    last = len(lengths) - 1
    where = {
        "starts": [sum(lengths[:i]) for i in range(len(lengths) + 1)],
        "pages": [7 - 2 * i for i in range(len(lengths))],
        "fresh": [i == 1 for i in range(len(lengths))],
        "exports": [(last, count, 8 + i) for i, count in enumerate((1, 2, 16)) if count <= lengths[last]],
    }
    expected = short_conv_prefill_reference(x, weight, expected_windows, **where)
    torch.testing.assert_close(short_conv_prefill(x, weight, windows, **where), expected, **CLOSE)
    torch.testing.assert_close(windows, expected_windows)
