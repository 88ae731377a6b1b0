"""A `vllm serve` process that lives as long as a with-block."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO


class ServerError(RuntimeError):
    """The server ended, or did not answer, before it was ready."""


def free_port() -> int:
    """A TCP port of the loopback address that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chat_options(name: str, max_model_len: int) -> list[str]:
    """Options of ``vllm serve`` for a miniature under a model name: the chat protocol, prefix caching, no graphs."""
    return [
        f"--served-model-name={name}",
        f"--max-model-len={max_model_len}",
        "--max-num-seqs=8",
        "--enforce-eager",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enable-auto-tool-choice",
        "--tool-call-parser=kimi_k3",
        "--reasoning-parser=kimi_k3",
    ]


class Server:
    """``vllm serve`` on a loopback port, with the plugin of this environment.

    Args:
        model: directory of the checkpoint.
        arguments: further arguments of ``vllm serve``.
        environment: variables on top of this process's; nothing is sent off the machine in any case.
        log: file that takes the server's output; a temporary one if None.
        timeout: seconds until it must be ready.

    Raises:
        ServerError: on entering, with the end of the server's log.
    """

    def __init__(
        self,
        model: Path,
        arguments: list[str],
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        timeout: float = 300,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.timeout = timeout
        self.log_path = log or Path(tempfile.mkstemp(prefix="vllm-serve-", suffix=".log")[1])
        vllm = Path(sys.executable).parent / "vllm"
        self._command = [str(vllm), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        # The engine belongs in a process of its own here, whatever the caller's own process does.
        self._environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", **quiet, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self) -> None:
        """Start it without waiting until it is ready."""
        self._log = self.log_path.open("wb")
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def __enter__(self) -> "Server":
        self.start()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None
        return self._process.pid

    def wait(self, timeout: float) -> int:
        """The exit code of a server that ends by itself.

        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        assert self._process is not None
        return self._process.wait(timeout)

    def log(self) -> str:
        """What the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self) -> int:
        """End the server as Ctrl-C does and return its exit code; what is left after 30 seconds is killed."""
        assert self._process is not None
        process = self._process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if self._log:
            self._log.close()
        return process.returncode

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"vllm serve ended with {self._process.returncode}:\n{self.log()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise ServerError(f"vllm serve was not ready after {self.timeout:.0f} s:\n{self.log()[-4000:]}")
