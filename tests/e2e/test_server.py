"""`vllm serve` with the plugin and the trained miniature, through the official clients of all three APIs."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.chat.wire import Blocks, Events, Streamed
from vllm_kimi_k3.chat.tokens import SpecialTokens
from vllm_kimi_k3.cli.server import Server, chat_options
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.nano.toolbox import TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.server]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
# What the miniature is asked, and what it answers.
SUM, TOTAL = "What is 25 + 31?", "25 + 31 = 56"
WEATHER, CITY = "What is the weather in Rome?", {"city": "Rome"}
TOOL = TOOLS["get_weather"]
FUNCTION = TOOL["function"]
# The server takes it, but this client has no argument for it.
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(target_path(), chat_options("k3", 4096), environment=ENVIRONMENT, timeout=500) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_the_plugin_serves(server: Server) -> None:
    log = server.log()
    assert "vllm-kimi-k3" in log and "registered" in log


def test_chat(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "k3", "messages": say(SUM), "max_tokens": 200, "temperature": 0}
    whole = client.chat.completions.create(**body)
    streamed = Streamed(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    message, usage = whole.choices[0].message, whole.usage
    assert message.content == streamed.content == TOTAL
    assert message.reasoning == streamed.reasoning != ""
    assert whole.choices[0].finish_reason == "stop" and streamed.finish == ["stop"]
    assert usage is not None and usage.completion_tokens_details is not None
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    assert streamed.usage.completion_tokens == usage.completion_tokens


def test_chat_call_and_result(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "k3", "tools": [TOOL], "max_tokens": 200, "temperature": 0}
    whole = client.chat.completions.create(**body, messages=say(WEATHER)).choices[0]
    streamed = Streamed(client.chat.completions.create(**body, messages=say(WEATHER), stream=True))
    assert whole.finish_reason == "tool_calls" and streamed.finish == ["tool_calls"]
    (made,) = whole.message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", CITY)
    ((call_id, name, arguments),) = streamed.calls.values()
    assert (name, arguments) == ("get_weather", made.function.arguments) and call_id != made.id
    result = {"role": "tool", "tool_call_id": made.id, "content": '{"sky": "cloudy", "degrees": 17}'}
    history = [*say(WEATHER), whole.message.model_dump(exclude_none=True), result]
    told = client.chat.completions.create(**body, messages=history).choices[0]
    assert "17" in told.message.content and told.finish_reason == "stop"


def test_chat_cut_by_the_limit(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "k3", "messages": say(SUM), "max_tokens": 3, "temperature": 0}
    whole = client.chat.completions.create(**body).choices[0]
    streamed = Streamed(client.chat.completions.create(**body, stream=True))
    assert whole.finish_reason == "length" and streamed.finish == ["length"]
    assert whole.message.reasoning == streamed.reasoning != ""
    assert not whole.message.content and not streamed.content


def test_responses(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "k3", "input": SUM, "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.create(**body)
    streamed = Events(client.responses.create(**body, stream=True))
    for response in (whole, streamed.final):
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output_text == TOTAL and response.status == "completed"
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert streamed.text("response.output_text.delta") == TOTAL
    assert streamed.text("response.reasoning_text.delta") == whole.output[0].content[0].text


def test_responses_call_and_result(client: openai.OpenAI) -> None:
    flat = {"type": "function", "strict": False, **FUNCTION}
    body: dict[str, Any] = {"model": "k3", "tools": [flat], "max_output_tokens": 200, "temperature": 0}
    whole = client.responses.create(**body, input=say(WEATHER))
    streamed = Events(client.responses.create(**body, input=say(WEATHER), stream=True))
    for response in (whole, streamed.final):
        made = response.output[-1]
        assert (made.type, made.name, json.loads(made.arguments)) == ("function_call", "get_weather", CITY)
    assert streamed.text("response.function_call_arguments.delta") == made.arguments
    result = {"type": "function_call_output", "call_id": made.call_id, "output": '{"sky": "cloudy", "degrees": 17}'}
    kept = [item.model_dump(exclude_none=True) for item in streamed.final.output]
    told = client.responses.create(**body, input=[*say(WEATHER), *kept, result])
    assert "17" in told.output_text


def test_messages(claude: anthropic.Anthropic) -> None:
    body: dict[str, Any] = {"model": "k3", "messages": say(SUM), "max_tokens": 200, "extra_body": GREEDY}
    whole = claude.messages.create(**body)
    streamed = Blocks(claude.messages.create(**body, stream=True))
    assert [block.type for block in whole.content] == streamed.kinds == ["thinking", "text"]
    assert [whole.content[0].thinking, whole.content[1].text] == [text for _, text in streamed.blocks]
    assert whole.content[1].text == TOTAL
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert whole.usage.input_tokens > 0 and whole.usage.output_tokens > 0


def test_messages_call_and_result(claude: anthropic.Anthropic) -> None:
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    body: dict[str, Any] = {"model": "k3", "tools": [tool], "max_tokens": 200, "extra_body": GREEDY}
    whole = claude.messages.create(**body, messages=say(WEATHER))
    streamed = Blocks(claude.messages.create(**body, messages=say(WEATHER), stream=True))
    assert [block.type for block in whole.content] == streamed.kinds
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    made = whole.content[-1]
    assert (made.type, made.name, made.input) == ("tool_use", "get_weather", CITY)
    assert json.loads(streamed.blocks[-1][1]) == CITY
    result = {"type": "tool_result", "tool_use_id": made.id, "content": '{"sky": "cloudy", "degrees": 17}'}
    kept = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in whole.content]}
    told = claude.messages.create(**body, messages=[*say(WEATHER), kept, {"role": "user", "content": [result]}])
    assert "17" in told.content[-1].text and told.stop_reason == "end_turn"


@pytest.mark.parametrize("thinking", [True, False])
def test_a_grammar_holds_the_model_to_the_form(client: openai.OpenAI, thinking: bool) -> None:
    """The miniature never learned to answer in JSON; pushed to close whatever is open, it cuts its thinking too."""
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


def fetch(server: Server, path: str) -> str:
    with urllib.request.urlopen(server.url + path, timeout=30) as response:
        return response.read().decode()


def cache_counters(text: str) -> dict[str, float]:
    """The prefix cache's prompt tokens by what became of them, from a page of metrics."""
    lines = re.findall(r'^vllm:kimi_k3_cache_prompt_tokens_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.MULTILINE)
    return {outcome: float(value) for outcome, value in lines}


def test_the_cache_tells_what_it_did(server: Server, client: openai.OpenAI) -> None:
    before = cache_counters(fetch(server, "/metrics"))
    text = "Count these: " + "one two three four five six seven eight nine ten " * 20
    usages = [
        client.chat.completions.create(model="k3", messages=say(text), max_tokens=2, temperature=0).usage
        for _ in range(2)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens or 0 for usage in usages if usage.prompt_tokens_details]
    assert cached[1] == (usages[1].prompt_tokens - 1) // 128 * 128 > 0
    after = cache_counters(fetch(server, "/metrics"))
    assert after["hit"] - before["hit"] == sum(cached)
    assert sum(after.values()) - sum(before.values()) == sum(usage.prompt_tokens for usage in usages)
    (engine,) = json.loads(fetch(server, "/k3/cache"))["engines"]
    assert engine["counts"]["tokens"] == {name: int(value) for name, value in after.items()}
    assert engine["ready"] and sum(engine["states"]["held"].values()) > 0
    assert fetch(server, "/health") == ""
