"""The engine on CPU with pages of K3's size: 768-token blocks and 8.68 % padding at TP8, as ``plan`` says.

The slice has four layers and few experts, none of which a page depends on.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.e2e.driver import Engine
from tests.e2e.slices import assert_cache_as_planned, cache_of, slice_plan, slice_settings, write_slice

LAYERS, EXPERTS = 4, 16


def main(directory: str) -> None:
    """In a process of its own: an engine on the slice, its cache beside the plan's; `VLLM_CPU_KVCACHE_SPACE` is 1."""
    engine = Engine(write_slice(Path(directory), 8, LAYERS, EXPERTS), **slice_settings())
    assert_cache_as_planned(engine, slice_plan(8, LAYERS, EXPERTS, 1 << 30), 0.01)
    cache = cache_of(engine)
    print("block", cache["block"], "padding", round(100 * cache["padding"], 2))
    engine.close()


@pytest.mark.slow
def test_pages_of_k3_at_tp8(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.e2e.test_slice_plan", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "block 768 padding 8.68" in done.stdout


if __name__ == "__main__":
    main(sys.argv[1])
