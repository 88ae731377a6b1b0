"""These tests need a GPU; the seed is fresh each run and stands in the report of a failure."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Skips all tests here without one. Of the session, so that it comes before any fixture that starts an engine."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def seed(gpu: None) -> None:
    print("seed", torch.seed())
