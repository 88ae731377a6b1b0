"""Two nodes of one server, on the processors of this machine: when the second is killed in a stream the first ends."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import REPOSITORY
from tests.e2e.processes import left
from vllm_kimi_k3.cli.server import Server, free_port

pytestmark = [pytest.mark.slow, pytest.mark.server]

#: Seconds within which a node must have ended after another was lost in a step; two were seen.
BOUND = 60


class Nodes:
    """Two ``vllm serve`` of the laptop's recipe as its two-node recipes start them; the second has no API server.

    Args:
        checkpoint: what both serve.
        layout: the flags of the parallel layout.
        logs: directory for both logs.
    """

    def __init__(self, checkpoint: Path, layout: list[str], logs: Path) -> None:
        port = str(free_port())
        recipe = ["--config", str(REPOSITORY / "recipes" / "nano-cpu.yaml")]
        arguments = [*recipe, *layout, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port]
        cores = sorted(os.sched_getaffinity(0))
        self.head, self.second = (
            Server(
                checkpoint,
                [*arguments, "--node-rank", str(rank), *(["--headless"] if rank else [])],
                environment={"VLLM_CPU_OMP_THREADS_BIND": str(cores[-rank]), "VLLM_LOGGING_LEVEL": "INFO"},
                log=logs / f"node-{rank}.log",
                timeout=400,
            )
            for rank in (0, 1)
        )

    def __enter__(self) -> "Nodes":
        self.second.start()
        try:
            self.head.__enter__()
        except BaseException:
            self.second.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for server in (self.head, self.second):
            server.stop()
            left(server.pid, 20)


def stream(server: Server) -> Iterator[Any]:
    """A long answer that has begun."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200)
    body: dict[str, Any] = {"model": "nano", "prompt": "a", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    chunks = iter(client.completions.create(**body, stream=True))
    next(chunks)
    return chunks


def test_the_second_node_is_killed_in_a_stream(checkpoint: Path, tmp_path: Path) -> None:
    with Nodes(checkpoint, ["--tensor-parallel-size", "2"], tmp_path) as nodes:
        chunks = stream(nodes.head)
        os.killpg(nodes.second.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as told:
            list(chunks)
        assert not isinstance(told.value, openai.APITimeoutError)
        assert nodes.head.wait(BOUND) == 1
        assert left(nodes.head.pid) == {}
        assert "the engine is dead" in nodes.head.log()
