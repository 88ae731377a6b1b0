"""`vllm-kimi-k3 verify` against a server of the laptop's recipe."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from vllm_kimi_k3.cli.main import main
from vllm_kimi_k3.cli.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    # fp32: random weights magnify what bf16 rounds apart.
    arguments = ["--config", str(REPOSITORY / "recipes" / "nano-cpu.yaml"), "--dtype", "float32"]
    with Server(checkpoint, arguments, environment={"OMP_NUM_THREADS": "1"}, timeout=500) as server:
        yield server


def test_every_check_passes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["verify", "--url", server.url, "--json"])
    report = json.loads(capsys.readouterr().out)
    outcomes = {check["check"]: (check["outcome"], check["detail"]) for check in report["checks"]}
    assert [name for name, (outcome, _) in outcomes.items() if outcome == "failed"] == [], outcomes
    assert status == report["failed"] == 0
    assert report["model"] == "nano"
    for name in ("cold equals warm", "stream equals whole", "tokens are the model's own", "text stays text"):
        assert outcomes[name][0] == "ok", outcomes[name]
    assert outcomes["tokens are the model's own"][1].startswith("0 of ")
    assert " 0 from the cache" not in outcomes["cold equals warm"][1]


def test_the_report_is_text_and_names_the_model(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--url", f"{server.url}/v1", "--model", "nano"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nano, server version 0.3")
    assert "0 of 8 checks failed" in out


CLIENTS = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "clients.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("code", CLIENTS, ids=["openai", "anthropic"])
def test_the_client_guides_code_runs(server: Server, code: str) -> None:
    names = {"URL": server.url, "KEY": "none", "MODEL": "nano"}
    exec(code, names)
    assert names["answer"]
