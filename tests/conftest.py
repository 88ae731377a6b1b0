"""What all tests share: a quiet, offline engine, and the directory of facts that a checkout may have beside it."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Before anything imports vLLM, which reads them once.
os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    # The models are tiny: a second thread costs more than it gives, most of all beside other work.
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
)
# The engine in the test's own process starts in a third of the time, and a test can look inside it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
# Without bytecode, each of the many processes that import vLLM spends 20 s more on it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Without a GPU, kernels run in Triton's interpreter, which Triton chooses when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared() -> Path:
    """The directory with goldens, vocabulary and specification, ``../shared`` of the repository."""
    path = REPOSITORY.parent / "shared"
    if not path.is_dir():
        pytest.skip("needs the shared directory with goldens beside the repository")
    return path
