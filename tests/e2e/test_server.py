"""`vllm serve` with the plugin, through the official openai client: it answers, refuses, and lives on."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from vllm_kimi_k3.chat.tokens import SpecialTokens
from vllm_kimi_k3.cli.server import Server
from vllm_kimi_k3.nano.shape import Shape

pytestmark = [pytest.mark.slow, pytest.mark.server]

ARGUMENTS = [
    "--served-model-name=k3",
    "--enforce-eager",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser=kimi_k3",
    "--reasoning-parser=kimi_k3",
    "--max-model-len=4096",
    "--max-num-seqs=8",
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with Server(checkpoint, ARGUMENTS, environment={"OMP_NUM_THREADS": "1"}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_the_plugin_serves(server: Server) -> None:
    log = server.log()
    assert "vllm-kimi-k3" in log and "registered" in log


def test_a_streamed_chat_equals_the_whole_one(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "k3", "messages": say("hello"), "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**request)
    thinking, content = "", ""
    for chunk in client.chat.completions.create(**request, stream=True):
        delta = chunk.choices[0].delta
        thinking += getattr(delta, "reasoning", None) or ""
        content += delta.content or ""
    message = whole.choices[0].message
    assert thinking == (getattr(message, "reasoning", None) or "")
    assert content == (message.content or "")
    assert thinking + content
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None and whole.usage.completion_tokens <= 24


def test_a_request_with_tools_is_served(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="k3", messages=say("weather in Paris?"), tools=[TOOL], tool_choice="required", max_tokens=200, seed=1
    )
    choice = answer.choices[0]
    assert choice.finish_reason in ("tool_calls", "length")
    for call in choice.message.tool_calls or []:
        assert call.function.name == "weather"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_grammar_holds_random_weights_to_the_format(client: openai.OpenAI, thinking: bool) -> None:
    """With thinking on, the grammar must cover it: random weights never close it the way vLLM looks for."""
    schema = {"type": "object", "properties": {"sky": {"enum": ["red", "blue"]}}, "required": ["sky"]}
    closed = {**schema, "additionalProperties": False}
    body: dict[str, Any] = {
        "model": "k3",
        "messages": say("the sky?"),
        "max_tokens": 400,
        "seed": 1,
        "logit_bias": {str(SpecialTokens.from_ranks(Shape().ranks).close): 12},
        "extra_body": {"chat_template_kwargs": {"thinking": thinking}},
    }
    form = {"type": "json_schema", "json_schema": {"name": "sky", "schema": closed}}
    answer = client.chat.completions.create(**body, response_format=form)
    assert json.loads(answer.choices[0].message.content or "")["sky"] in ("red", "blue")
    tool = {"type": "function", "function": {"name": "paint", "parameters": closed, "strict": True}}
    answer = client.chat.completions.create(**body, tools=[tool], tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    for call in answer.choices[0].message.tool_calls or []:
        assert call.function.name == "paint" and json.loads(call.function.arguments)["sky"] in ("red", "blue")


def test_a_repeated_prompt_is_read_from_the_cache(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "k3", "messages": say("one two three " * 200), "max_tokens": 2}
    client.chat.completions.create(**request)
    usage = client.chat.completions.create(**request).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hello"},
        {"messages": [{"role": "wizard", "content": "hello"}]},
        {"messages": []},
        {"messages": say("hello"), "reasoning_effort": "enormous"},
        {"messages": say("hello"), "max_tokens": -5},
        {"messages": say("hello"), "temperature": "hot"},
        {"messages": say("hello"), "tools": [{"type": "function"}]},
        {"messages": say("hello " * 6000)},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                }
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "file:///a.mp4"}}]}]},
    ],
    ids=["text", "role", "empty", "effort", "length", "temperature", "tool", "long", "image", "video"],
)
def test_a_bad_body_gets_a_4xx_and_the_server_lives(
    server: Server, client: openai.OpenAI, body: dict[str, Any]
) -> None:
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        data=json.dumps({"model": "k3", **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(request, timeout=60)
    assert 400 <= refusal.value.code < 500
    assert json.loads(refusal.value.read())["error"]["message"]
    answer = client.chat.completions.create(model="k3", messages=say("still there?"), max_tokens=2)
    assert answer.choices[0].finish_reason in ("stop", "length")
