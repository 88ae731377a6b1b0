"""Processes of vLLM's that serve K3: none outlives the one that started it, and a server whose engine died says so."""

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from vllm_kimi_k3.compat.patch import wrap
from vllm_kimi_k3.compat.scheduler import add_cache_view

logger = logging.getLogger("vllm.vllm_kimi_k3.processes")

#: How vLLM names the processes that hold a model.
_NAMES = ("EngineCore", "VllmWorker")
_WATCH = "vllm-kimi-k3-parent"
#: Seconds from asking a process to end until it is ended.
_GRACE = 10.0


def end_with_parent() -> None:
    """Watch the process that started this one, and end this one soon after the other is gone.

    vLLM's engine core waits for requests for ever when its API server is killed, and its worker looks for the engine
    core only once it has loaded: both would keep their GPUs. Does nothing in a process that is neither, and nothing
    the second time.
    """
    parent = multiprocessing.parent_process()
    held = multiprocessing.current_process().name.startswith(_NAMES)
    if parent is None or not held or any(thread.name == _WATCH for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(parent.pid,), name=_WATCH, daemon=True).start()


def _watch(parent: int) -> None:
    # A process whose parent has died is given another.
    while os.getppid() == parent:
        time.sleep(0.5)
    logger.error("process %d, which started this one, is gone: ending", parent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def patch_executor(architectures: Collection[str]) -> None:
    """0.32, 0.33: an engine core that serves one of these architectures watches its parent from before it loads.

    It also learns to tell its cache's numbers.
    """
    from vllm.v1.executor.abstract import Executor

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def executor(self: Any, vllm_config: Any) -> None:
            if not set(architectures).isdisjoint(vllm_config.model_config.architectures):
                end_with_parent()
                add_cache_view()
            init(self, vllm_config)

        return executor

    wrap(Executor, "__init__", ("self", "vllm_config"), make)


def patch_exit_code() -> None:
    """0.32, 0.33: a server that ends because its engine died ends with exit code 1; vLLM's own says 0, all is well."""
    from vllm.entrypoints.launchers.api_server import entry

    def make(serve: Callable[..., Any]) -> Callable[..., Any]:
        async def serve_http(app: Any, *args: Any, **kwargs: Any) -> Any:
            engine = app.state.engine_client
            stop, asked = engine.shutdown, threading.Event()

            def shutdown(*args: Any, **kwargs: Any) -> Any:
                asked.set()
                return stop(*args, **kwargs)

            engine.shutdown = shutdown
            ended = await serve(app, *args, **kwargs)
            if engine.errored and not asked.is_set():
                await ended
                logger.critical("the engine is dead: the server ends with exit code 1")
                raise SystemExit(1)
            return ended

        return serve_http

    wrap(entry, "serve_http", ("app", "sock"), make)
