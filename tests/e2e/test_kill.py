"""A server killed in a stream, or its engine under it: an error for the client, an exit code, no process left."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.processes import family, left
from vllm_kimi_k3.cli.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path) -> Server:
    """Of the laptop's recipe, not started yet."""
    arguments = ["--config", str(REPOSITORY / "recipes" / "nano-cpu.yaml")]
    environment = {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    return Server(checkpoint, arguments, environment=environment, log=tmp_path / "log", timeout=500)


def stream(server: Server) -> Iterator[Any]:
    """A long answer that has begun; silence for 200 s is a timeout, which is no error of the server's."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200)
    body: dict[str, Any] = {"model": "nano", "prompt": "a", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    chunks = iter(client.completions.create(**body, stream=True))
    next(chunks)
    return chunks


def assert_fails(chunks: Iterator[Any]) -> None:
    """The rest of a stream ends with an error, and not with silence."""
    with pytest.raises(openai.APIError) as told:
        for _ in chunks:
            pass
    assert not isinstance(told.value, openai.APITimeoutError)


def named(server: Server, name: str) -> int:
    [pid] = [pid for pid, found in family(server.pid).items() if name in found]
    return pid


def test_its_engine_is_killed_under_a_stream(server: Server) -> None:
    with server:
        chunks = stream(server)
        os.kill(named(server, "EngineCore"), signal.SIGKILL)
        assert_fails(chunks)
        assert left(server.pid) == {}
        assert server.stop() == 1
        assert "the engine is dead" in server.log()


def test_it_is_killed_in_a_stream(server: Server) -> None:
    with server:
        chunks = stream(server)
        os.kill(server.pid, signal.SIGKILL)
        assert_fails(chunks)
        assert left(server.pid) == {}
        assert server.stop() == -signal.SIGKILL
