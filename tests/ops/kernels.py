"""Where kernel tests run: on the GPU, or without one in Triton's interpreter (fp32: its bf16 products are wrong)."""

import pytest
import torch

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
#: Sums in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
