"""``vllm-kimi-k3 check`` as a command, and the same checks at ``vllm serve``."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.conftest import node
from vllm_kimi_k3.cli.main import main
from vllm_kimi_k3.preflight.engine import PreflightError, preflight

CHAT = ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k3", "--reasoning-parser", "kimi_k3"]
SOUND = ["moonshotai/Kimi-K3", "--tensor-parallel-size", "8", "--enable-prefix-caching", *CHAT]


def test_a_sound_command_is_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--gpu", "b300", "--count", "8", "--no-files", "--", "serve", *SOUND]) == 0
    assert capsys.readouterr().out == "0 errors, 0 warnings\n"


def test_errors_are_exit_code_1_with_what_why_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--gpu", "h200", "--count", "8", "--no-files", "--", *SOUND]) == 1
    out = capsys.readouterr().out
    assert "error [weights-do-not-fit] TP8 on h200" in out
    assert "why: " in out and "fix: " in out
    assert out.endswith("1 errors, 0 warnings\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    bad = [*SOUND, "--kv-cache-dtype", "nvfp4"]
    assert main(["check", "--gpu", "b300", "--count", "8", "--no-files", "--json", "--", *bad]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == 1
    assert {"level", "code", "what", "why", "fix"} == set(report["findings"][0])


@pytest.mark.parametrize("arguments", [["--config", "absent.yaml"], ["--gpu", "b400"], ["--", "a", "b"]])
def test_arguments_that_cannot_be_read_are_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    assert "vllm-kimi-k3 check: " in capsys.readouterr().err


@pytest.mark.slow
def test_it_takes_less_than_ten_seconds(healthy_checkpoint: Path) -> None:
    command = [sys.executable, "-m", "vllm_kimi_k3.cli.main", "check", "--", str(healthy_checkpoint)]
    before = time.process_time() + sum(_children())
    done = subprocess.run([*command, "--enable-prefix-caching", *CHAT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "0 errors, 0 warnings\n"), done.stderr
    # Of processor time: other work on the machine must not fail this.
    assert time.process_time() + sum(_children()) - before < 10


def _children() -> tuple[float, float]:
    import os

    times = os.times()
    return times.children_user, times.children_system


@pytest.fixture(scope="module")
def vllm_config(healthy_checkpoint: Path) -> Any:
    """vLLM's config for serving the miniature on CPU."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(str(healthy_checkpoint), enable_prefix_caching=True, max_model_len=2048, enforce_eager=True)
    return arguments.create_engine_config()


def test_a_sound_deployment_passes_at_serve(vllm_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    preflight(vllm_config, node("cpu", 0))
    assert "preflight" not in caplog.text


def test_warnings_are_logged_and_errors_stop_at_serve(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr("vllm_kimi_k3.preflight.engine.logger.warning", lambda text, *a: logged.append(text % a))
    monkeypatch.setattr(vllm_config.cache_config, "mamba_ssm_cache_dtype", "float16")
    monkeypatch.setenv("AITER_SITUV2_A8W4", "1")
    with pytest.raises(PreflightError, match=r"(?s)1 errors; VLLM_KIMI_K3_PREFLIGHT=0.*state-dtype.*fix: "):
        preflight(vllm_config, node("cpu", 0))
    assert ["renamed-variable" in line for line in logged] == [True]


@pytest.mark.slow
def test_vllm_itself_stops_before_loading(healthy_checkpoint: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(str(healthy_checkpoint), max_model_len=2048, mamba_ssm_cache_dtype="float16")
    with pytest.raises(ValueError, match="state-dtype"):
        arguments.create_engine_config()
