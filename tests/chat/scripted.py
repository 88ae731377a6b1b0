"""vLLM's real API server on loopback, with a script in place of the model.

Everything is vLLM's own from HTTP down to the engine core's socket: routes, input processor, detokenizer, stop strings,
usage. Only the core is replaced: it answers each request with the next script.
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import uvicorn
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.metrics.stats import PrefillStats

from vllm_kimi_k3 import register
from vllm_kimi_k3.nano.shape import Shape, k3_config
from vllm_kimi_k3.nano.vocabulary import write_tokenizer

MODEL = "k3"
_STEP_SECONDS = 0.003


@dataclass
class Script:
    """What the model writes: `ids`, `step` of them at a time. `cut`: the token limit ends it, not the model."""

    ids: list[int]
    step: int = 1
    cut: bool = False
    cached: int = 0


@dataclass
class ScriptedCore:
    """Stands where vLLM's client of the engine core stands."""

    scripts: deque[Script] = field(default_factory=deque)
    requests: list[EngineCoreRequest] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    engine_ranks_managed: list[int] = field(default_factory=lambda: [0])
    resources: Any = field(default_factory=lambda: SimpleNamespace(engine_dead=False))

    def __post_init__(self) -> None:
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.requests.append(request)
        script = self.scripts.popleft()
        prompt = len(request.prompt_token_ids or ())
        stats = PrefillStats()
        stats.set(num_prompt_tokens=prompt, num_local_cached_tokens=script.cached, num_external_cached_tokens=0)
        self._tasks.append(asyncio.create_task(self._play(request.request_id, script, stats)))

    async def _play(self, request_id: str, script: Script, stats: PrefillStats) -> None:
        for at in range(0, len(script.ids), script.step):
            last = at + script.step >= len(script.ids)
            reason = FinishReason.LENGTH if script.cut else FinishReason.STOP
            output = EngineCoreOutput(
                request_id=request_id,
                new_token_ids=script.ids[at : at + script.step],
                finish_reason=reason if last else None,
                prefill_stats=stats if at == 0 else None,
            )
            self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))
            if request_id in self.aborted:
                return
            # vLLM joins outputs that nobody has fetched yet; a moment apart, each becomes a delta.
            await asyncio.sleep(_STEP_SECONDS)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted.update(request_ids)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


@dataclass
class Server:
    """A running server: where it listens, its core, and its tokenizer."""

    url: str
    core: ScriptedCore
    tokenizer: Any

    def play(self, *scripts: Script) -> None:
        """Queue what the model answers to the next requests."""
        assert not self.core.scripts, "a script of an earlier request was not used"
        self.core.scripts.extend(scripts)

    @property
    def last_request(self) -> EngineCoreRequest:
        return self.core.requests[-1]


def write_model(out: Path) -> Path:
    """A checkpoint directory without weights: configuration and vocabulary of the miniature."""
    out.mkdir(parents=True)
    special = write_tokenizer(out)
    (out / "config.json").write_text(json.dumps(k3_config(Shape())))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": special.end_of_msg}))
    return out


@contextmanager
def serve(model: Path, *flags: str) -> Iterator[Server]:
    """Run the server in a thread for the duration of the block."""
    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    common = ["--model", str(model), "--served-model-name", MODEL, "--tokenizer-mode", "kimi_k3", "--enforce-eager"]
    limits = ["--max-model-len", "4096", "--disable-log-stats", "--limit-mm-per-prompt", '{"image": 0}']
    parsers = ["--tool-call-parser", "kimi_k3", "--reasoning-parser", "kimi_k3", "--enable-auto-tool-choice"]
    args = parser.parse_args([*common, *limits, *parsers, "--enable-prompt-tokens-details", *flags])
    validate_parsed_serve_args(args)
    ready, box = threading.Event(), SimpleNamespace(error=None)

    async def run() -> None:
        core = ScriptedCore()
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", lambda **_: core):
            engine = AsyncLLM.from_vllm_config(AsyncEngineArgs.from_cli_args(args).create_engine_config())
        app = build_app(args, ("generate",), engine.model_config)
        await init_app_state(engine, app.state, args, ("generate",))
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
        box.uvicorn = uvicorn.Server(config)
        task = asyncio.create_task(box.uvicorn.serve())
        while not box.uvicorn.started:
            await asyncio.sleep(0.01)
        port = box.uvicorn.servers[0].sockets[0].getsockname()[1]
        box.server = Server(f"http://127.0.0.1:{port}", core, engine.renderer.tokenizer)
        ready.set()
        await task
        engine.shutdown()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            box.error = error
            ready.set()
            raise

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    ready.wait()
    if box.error is not None:
        raise box.error
    try:
        yield box.server
    finally:
        box.uvicorn.should_exit = True
        thread.join(timeout=30)
