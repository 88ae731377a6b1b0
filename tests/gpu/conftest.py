"""These tests need a GPU; the seed is fresh each run and stands in the report of a failure."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    print("seed", torch.seed())
