"""Thinking that a client drops comes back, streamed or not, in every API, through vLLM's server."""

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.chat.scripted import MODEL, Server, serve, write_model
from tests.chat.test_server import ANSWER, CALL, CLAUDE_TOOL, FLAT_TOOL, TOOL, USER, prompt_of, script

pytestmark = pytest.mark.slow

ANSWERED: list[Any] = [*USER, {"role": "assistant", "content": "Hello 😀"}, *USER]
PLAIN = "<|open|>think<|sep|>let me think<|close|>think<|sep|>"
CALLED = "<|open|>think<|sep|>hm<|close|>think<|sep|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(write_model(tmp_path_factory.mktemp("model") / "k3")) as running:
        yield running


def chat(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def messages(server: Server, key: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def test_streamed_chat(server: Server) -> None:
    client = chat(server, "streamed")
    server.play(script(server, ANSWER), script(server, ANSWER))
    list(client.chat.completions.create(model=MODEL, messages=USER, stream=True))
    client.chat.completions.create(model=MODEL, messages=ANSWERED)
    assert PLAIN in prompt_of(server)


def test_another_key_gets_nothing(server: Server) -> None:
    server.play(script(server, ANSWER), script(server, ANSWER), script(server, ANSWER))
    chat(server, "anna").chat.completions.create(model=MODEL, messages=USER)
    chat(server, "bert").chat.completions.create(model=MODEL, messages=ANSWERED)
    assert PLAIN not in prompt_of(server)
    chat(server, "anna").chat.completions.create(model=MODEL, messages=ANSWERED)
    assert PLAIN in prompt_of(server)


def test_hidden_thinking_comes_back_too(server: Server) -> None:
    """A client that never saw the thinking cannot send it."""
    client = chat(server, "hidden")
    server.play(script(server, ANSWER), script(server, ANSWER))
    client.chat.completions.create(model=MODEL, messages=USER, extra_body={"include_reasoning": False})
    client.chat.completions.create(model=MODEL, messages=ANSWERED)
    assert PLAIN in prompt_of(server)


def test_streamed_messages_call(server: Server) -> None:
    client = messages(server, "claude")
    tools: Any = [CLAUDE_TOOL]
    server.play(script(server, CALL), script(server, ANSWER))
    with client.messages.stream(model=MODEL, max_tokens=100, messages=USER, tools=tools) as stream:
        made = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    kept = {"type": "tool_use", "id": made.id, "name": made.name, "input": made.input}
    history: list[Any] = [
        *USER,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "AAAA"}, kept]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": made.id, "content": "sunny"}]},
    ]
    client.messages.create(model=MODEL, max_tokens=100, messages=history, tools=tools)
    assert CALLED in prompt_of(server)


def test_streamed_responses_call(server: Server) -> None:
    client = chat(server, "responses")
    tools: Any = [FLAT_TOOL]
    server.play(script(server, CALL), script(server, ANSWER))
    events = list(client.responses.create(model=MODEL, input="Hi", tools=tools, stream=True))
    made = next(item for item in events[-1].response.output if item.type == "function_call")
    history: list[Any] = [
        *USER,
        {"type": "function_call", "call_id": made.call_id, "name": made.name, "arguments": made.arguments},
        {"type": "function_call_output", "call_id": made.call_id, "output": "sunny"},
    ]
    client.responses.create(model=MODEL, input=history, tools=tools)
    assert CALLED in prompt_of(server)


def test_the_next_prompt_begins_with_what_was_generated(server: Server) -> None:
    """Prompt and output of a turn are a prefix of the next prompt, so the prefix cache has all of it."""
    client = chat(server, "prefix")
    tools: Any = [TOOL]
    output = script(server, CALL)
    server.play(output, script(server, ANSWER))
    first = client.chat.completions.create(model=MODEL, messages=USER, tools=tools).choices[0].message
    before = list(server.last_request.prompt_token_ids)
    made = first.tool_calls[0]
    history = [
        *USER,
        {"role": "assistant", "content": first.content, "tool_calls": [made.model_dump()]},
        {"role": "tool", "tool_call_id": made.id, "content": "sunny"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=tools)
    generated = before + output.ids
    assert list(server.last_request.prompt_token_ids)[: len(generated)] == generated
