"""``vllm-kimi-k3 plan`` as a command."""

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest

from vllm_kimi_k3.cli.main import main


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "b300", "--count", "8"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "8 x b300",
        "Blocks of 768 tokens",
        "padded by 8.68%",
        "weights: experts",
        "Requests at once",
        "█",
    ):
        assert expected in text


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    draft = ["--draft", "Inferact/Kimi-K3-DSpark"]
    assert main(["plan", "--gpu", "b300", "--count", "8", *draft, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["pages"]["block_tokens"] == 768
    assert plan["draft"] == {"name": "Inferact/Kimi-K3-DSpark", "tokens": 7}
    assert plan["fits"] is True
    assert plan["requests_at"]["131072"] > 1


def test_picture(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    main(["plan", "--gpu", "h200", "--tp", "8", "--pp", "2", "--svg", str(picture)])
    bars = xml.etree.ElementTree.parse(picture).getroot().findall("{http://www.w3.org/2000/svg}rect")
    assert len(bars) == 2 * 5
    assert max(float(bar.get("x")) + float(bar.get("width")) for bar in bars) <= 960


def test_what_does_not_fit_is_exit_code_1_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "b200", "--count", "8"]) == 1
    assert "16 GPUs as TP16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "b400"], "expected one of"),
        (["--gpu", "b300", "--tp", "7"], "tensor-parallel size 7 does not divide"),
        (["--gpu", "b300", "--count", "9", "--tp", "8"], "TP8 takes 8 GPUs, --count says 9"),
        (["--gpu", "b300", "--draft", "nobody/nothing"], "expected one of Inferact"),
        (["--gpu", "b300", "--kv-cache-dtype", "int3"], "KV dtype 'int3'"),
        (["--gpu", "b300", "--model", "absent"], "absent/config.json"),
    ],
)
def test_a_bad_argument_is_exit_code_2_and_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err
