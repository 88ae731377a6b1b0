"""The tower's benchmark runs, and what it compares is the same computation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "vision.py"


@pytest.mark.slow
def test_our_tower_and_vllms_give_the_same_embeddings(tmp_path: Path) -> None:
    report = tmp_path / "rows.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--rounds", "1", "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [row["tower"] for row in rows] == ["ours", "vllm"] * 2
    for row in rows:
        assert row["fault"] is None and row["ms"] > 0
        assert row["error"] < 1e-5
        assert row["tower"] == "ours" or row["difference"] < 1e-4
