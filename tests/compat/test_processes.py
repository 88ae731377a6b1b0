"""Engine cores and workers end with the process that started them; nothing else does."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_kimi_k3.compat import processes

#: A process that starts another by vLLM's name for it, prints its id, and waits.
PARENT = """
import multiprocessing, signal, sys, time
from vllm_kimi_k3.compat import processes

def child():
    processes._GRACE = 1.0
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.end_with_parent()
    processes.end_with_parent()
    time.sleep(60)

process = multiprocessing.get_context("fork").Process(target=child, name=sys.argv[1])
process.start()
print(process.pid, flush=True)
time.sleep(60)
"""


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def outlives(name: str, hearing: str, seconds: float) -> bool:
    """Whether a child is still there so long after its parent was killed."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, name, hearing], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert lives(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + seconds
        while lives(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        return lives(child)
    finally:
        parent.stdout.close()
        if lives(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("name", ["EngineCore", "EngineCore_DP1", "VllmWorker-3"])
@pytest.mark.parametrize("hearing", ["hears", "deaf"])
def test_a_process_that_holds_a_model_ends_with_its_parent(name: str, hearing: str) -> None:
    assert not outlives(name, hearing, 30)


def test_a_process_of_somebody_elses_lives_on() -> None:
    assert outlives("Process-1", "hears", 2)


def end_of_server(errored: bool, asked: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the wrapped `serve_http` ends with when its engine is so and the server was asked to stop or not."""
    from vllm.entrypoints.launchers.api_server import entry

    engine = SimpleNamespace(errored=errored, shutdown=lambda timeout: None)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine))

    async def serve_http(app: Any, sock: Any, **_: Any) -> Any:
        if asked:
            app.state.engine_client.shutdown(timeout=0)
        return asyncio.sleep(0, "ended")

    monkeypatch.setattr(entry, "serve_http", serve_http)
    monkeypatch.setattr("vllm_kimi_k3.compat.patch._patched", {})
    processes.patch_exit_code()

    async def run() -> Any:
        return await (await entry.serve_http(app, None))

    return asyncio.run(run())


@pytest.mark.parametrize(("errored", "asked"), [(False, False), (False, True), (True, True)])
def test_a_server_that_was_asked_to_stop_ends_as_vllms(
    errored: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end_of_server(errored, asked, monkeypatch) == "ended"


def test_a_server_whose_engine_died_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        end_of_server(True, False, monkeypatch)
    assert ended.value.code == 1
