"""``vllm-kimi-k3 demo``: serve the miniature K3 and talk to it through the openai client."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_kimi_k3.cli.server import Server

ARGUMENTS = [
    "--served-model-name=nano",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser=kimi_k3",
    "--reasoning-parser=kimi_k3",
    "--max-model-len=4096",
    "--max-num-seqs=8",
]
SYSTEM = "You are a helpful assistant. " + "Answer in short sentences. " * 40
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def add_parser(subparsers: Any) -> None:
    """Add ``demo``."""
    parser = subparsers.add_parser("demo", help="serve the miniature K3 and talk to it")
    parser.add_argument("--model", type=Path, help="a checkpoint to serve instead of the miniature")
    parser.set_defaults(run=_run)


@contextmanager
def _checkpoint(given: Path | None) -> Iterator[Path]:
    """A given one, the packaged miniature, or a random one, which speaks nonsense in the right protocol."""
    from vllm_kimi_k3.nano.checkpoint import build
    from vllm_kimi_k3.nano.packaged import NotPackagedError, target_path

    if given is not None:
        yield given
        return
    try:
        yield target_path()
    except NotPackagedError:
        with tempfile.TemporaryDirectory() as directory:
            yield build(Path(directory) / "nano", seed=0)


def _run(options: argparse.Namespace) -> int:
    with _checkpoint(options.model) as model:
        print(f"starting: vllm serve {model} {' '.join(ARGUMENTS)}")
        began = time.monotonic()
        with Server(model, ARGUMENTS, environment={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
            print(f"ready after {time.monotonic() - began:.0f} s at {server.url}")
            talk(server.url)
            status = server.stop()
        print(f"\nserver stopped with exit code {status}")
    return status


def talk(url: str) -> None:
    """Send a streamed chat, a tool-call request, and the first chat again; print what goes and what comes."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello, who are you?"}]
    request: dict[str, Any] = {"model": "nano", "messages": messages, "max_tokens": 60, "seed": 1}
    _show("a streamed chat", request)
    began, usage = time.monotonic(), None
    for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            print(getattr(choice.delta, "reasoning", None) or choice.delta.content or "", end="", flush=True)
    _count(usage, time.monotonic() - began)

    request |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
    _show("a request for a tool call", request)
    began = time.monotonic()
    answer = client.chat.completions.create(**request)
    print(answer.choices[0].message.to_json(indent=None))
    print(f"finish_reason: {answer.choices[0].finish_reason}", end="")
    _count(answer.usage, time.monotonic() - began)

    request |= {"max_tokens": 8}
    _show("the same again, from the prefix cache", request)
    began = time.monotonic()
    _count(client.chat.completions.create(**request).usage, time.monotonic() - began)


def _show(title: str, request: dict[str, Any]) -> None:
    sent = {name: value for name, value in request.items() if name != "messages"}
    print(f"\n== {title}\n-> {request['messages'][-1]['content']!r} {json.dumps(sent)}\n<- ", end="")


def _count(usage: Any, seconds: float) -> None:
    cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    print(
        f"\n   {usage.prompt_tokens} prompt tokens, {cached} of them cached; {usage.completion_tokens} generated in "
        f"{seconds:.1f} s, {usage.completion_tokens / seconds:.0f} tokens a second"
    )
