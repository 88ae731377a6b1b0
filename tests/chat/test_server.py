"""Chat Completions, Responses and Messages through vLLM's server and the official clients, with scripted outputs."""

import json
from collections.abc import Iterator

import anthropic
import jsonschema
import openai
import pytest
import xgrammar

from tests.chat.scripted import MODEL, Script, Server, serve, write_model
from tests.chat.shapes import argument, call, tools
from tests.chat.wire import Blocks, Events, Streamed
from vllm_kimi_k3.chat.vllm_structure import grammar_compiler

pytestmark = pytest.mark.slow

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
FLAT_TOOL = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}
CLAUDE_TOOL = {"name": "weather", "input_schema": WEATHER}
USER = [{"role": "user", "content": "Hi"}]

END = "<C>message<S><E>"
ANSWER = "let me think<C>think<S><O>response<S>Hello 😀<C>response<S>" + END
CITY = argument("city", "string", 'Ol"o\nmouc')
CALL = (
    f"hm<C>think<S><O>response<S>Ok.<C>response<S>{tools(call('weather', CITY, argument('days', 'number', '2')))}" + END
)
ARGUMENTS = {"city": 'Ol"o\nmouc', "days": 2}
LOST = f"need a list. A small one.<C>response<S>{tools(call('weather', CITY))}" + END
CUT = '<C>think<S><O>tools<S><O>call tool="weather" index="1"<S><O>argument key="city" type="string"<S>Olo'
CITY_ONLY = '{"city": "Ol\\"o\\nmouc"}'
TWO = f"<C>think<S>{tools(call('weather', CITY), call('weather', CITY, index=2))}" + END


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(write_model(tmp_path_factory.mktemp("model") / "k3")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0)


def ids_of(server: Server, output: str) -> list[int]:
    marked = output
    for short, name in (("<O>", "<|open|>"), ("<C>", "<|close|>"), ("<S>", "<|sep|>"), ("<E>", "<|end_of_msg|>")):
        marked = marked.replace(short, name)
    return server.tokenizer.k3.encode(marked, allow_special=True)


def script(server: Server, output: str, **options) -> Script:
    return Script(ids_of(server, output), **options)


def prompt_of(server: Server) -> str:
    return server.tokenizer.k3.decode(server.last_request.prompt_token_ids)


def complete(server: Server, client: openai.OpenAI, output: str, cut: bool = False, **fields):
    """The same output whole and streamed."""
    server.play(script(server, output, cut=cut), script(server, output, cut=cut))
    body = {"model": MODEL, "messages": USER, **fields}
    whole = client.chat.completions.create(**body)
    stream = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    return whole, Streamed(stream)


CHATS = [
    ("answer", ANSWER, False, "let me think", "Hello 😀", [], "stop"),
    ("call", CALL, False, "hm", "Ok.", [json.dumps(ARGUMENTS)], "tool_calls"),
    ("two calls", TWO, False, "", "", [CITY_ONLY] * 2, "tool_calls"),
    ("think not closed before tools", LOST, False, "need a list. A small one.", "", [CITY_ONLY], "tool_calls"),
    ("zero-length think", "42<C>response<S>" + END, False, "42", "42", [], "stop"),
    ("cut thinking", "let me", True, "let me", "", [], "length"),
    ("cut argument", CUT, True, "", "", ['{"city": "Olo'], "length"),
    ("markers written as text", "<C>think<S><O>response<S>The <|sep|", True, "", "The <|sep|", [], "length"),
]


@pytest.mark.parametrize("case", CHATS, ids=[case[0] for case in CHATS])
def test_chat(server: Server, client: openai.OpenAI, case: tuple):
    _, output, cut, reasoning, content, arguments, finish = case
    whole, streamed = complete(server, client, output, cut, tools=[TOOL])
    message = whole.choices[0].message
    made = [(made.function.name, made.function.arguments) for made in message.tool_calls or []]
    assert (message.reasoning or "", message.content or "") == (reasoning, content)
    assert made == [("weather", text) for text in arguments]
    assert whole.choices[0].finish_reason == finish
    assert (streamed.reasoning, streamed.content, streamed.finish) == (reasoning, content, [finish])
    assert [(name, text) for _, name, text in streamed.calls.values()] == made
    ids = [made.id for made in message.tool_calls or []] + [call_id for call_id, _, _ in streamed.calls.values()]
    assert len(set(ids)) == len(ids)
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens == len(ids_of(server, output))


def test_chat_usage(server: Server, client: openai.OpenAI):
    server.play(script(server, ANSWER, cached=7))
    usage = client.chat.completions.create(model=MODEL, messages=USER).usage
    assert usage.prompt_tokens_details.cached_tokens == 7
    assert usage.completion_tokens_details.reasoning_tokens == len(ids_of(server, "let me think"))
    assert usage.prompt_tokens == len(server.last_request.prompt_token_ids)
    _, streamed = complete(server, client, ANSWER)
    assert streamed.usage.completion_tokens_details.reasoning_tokens == len(ids_of(server, "let me think"))


def test_chat_arguments_stream(server: Server, client: openai.OpenAI):
    text = "a long text " * 30
    output = f"<C>think<S>{tools(call('weather', argument('city', 'string', text)))}" + END
    _, streamed = complete(server, client, output, tools=[TOOL])
    assert streamed.argument_deltas > 30 and json.loads(streamed.calls[0][2]) == {"city": text}


def test_chat_steps_of_many_tokens(server: Server, client: openai.OpenAI):
    for step in (2, 5, 8, 100):
        server.play(script(server, CALL, step=step))
        streamed = Streamed(client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], stream=True))
        assert (streamed.reasoning, streamed.content) == ("hm", "Ok.")
        assert json.loads(streamed.calls[0][2]) == ARGUMENTS and streamed.finish == ["tool_calls"]


def test_chat_several_choices(server: Server, client: openai.OpenAI):
    server.play(script(server, ANSWER), script(server, CALL))
    response = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL], n=2)
    assert sorted(choice.finish_reason for choice in response.choices) == ["stop", "tool_calls"]
    assert sorted(choice.message.reasoning for choice in response.choices) == ["hm", "let me think"]


def test_chat_stop_string(server: Server, client: openai.OpenAI):
    output = "think<C>think<S><O>response<S>one two three four<C>response<S>" + END
    whole, streamed = complete(server, client, output, stop=["o thr"])
    assert whole.choices[0].message.content == streamed.content == "one tw"
    assert whole.choices[0].finish_reason == "stop" and streamed.finish == ["stop"]


def test_chat_tool_choice_none(server: Server, client: openai.OpenAI):
    whole, streamed = complete(server, client, CALL, tools=[TOOL], tool_choice="none")
    assert not whole.choices[0].message.tool_calls and not streamed.calls
    assert whole.choices[0].message.content == streamed.content == "Ok."
    assert whole.choices[0].finish_reason == "stop" and streamed.finish == ["stop"]


def grammar_of(server: Server) -> xgrammar.GrammarMatcher:
    tag = server.last_request.sampling_params.structured_outputs.structural_tag
    k3 = server.tokenizer.k3
    return xgrammar.GrammarMatcher(grammar_compiler(k3, k3.special.vocab_size).compile_structural_tag(tag))


def accepts(server: Server, output: str) -> bool:
    state = grammar_of(server)
    return all(state.accept_token(token) for token in ids_of(server, output)) and state.is_terminated()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_chat_forced_call(server: Server, client: openai.OpenAI, choice):
    whole, streamed = complete(server, client, CALL, tools=[TOOL], tool_choice=choice)
    assert json.loads(whole.choices[0].message.tool_calls[0].function.arguments) == ARGUMENTS
    assert json.loads(streamed.calls[0][2]) == ARGUMENTS
    assert accepts(server, CALL) and not accepts(server, ANSWER)


def test_chat_forced_call_names_an_unknown_tool(server: Server, client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(
            model=MODEL,
            messages=USER,
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "other"}},
        )


@pytest.mark.parametrize("thinking", [True, False])
def test_chat_response_format(server: Server, client: openai.OpenAI, thinking: bool):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = '{"city": "x"}<C>response<S>' + END
    output = "hm<C>think<S><O>response<S>" + answer if thinking else answer
    kwargs = {"chat_template_kwargs": {"thinking": thinking}}
    whole, streamed = complete(server, client, output, response_format=form, extra_body=kwargs)
    jsonschema.validate(json.loads(whole.choices[0].message.content), WEATHER)
    assert streamed.content == whole.choices[0].message.content
    assert accepts(server, output) and not accepts(server, ANSWER)
    if thinking:
        assert accepts(server, "<O>response<S>" + answer)
    assert "response_format=json_schema" in prompt_of(server)


def test_chat_thinking_comes_back(server: Server, client: openai.OpenAI):
    server.play(script(server, CALL), script(server, ANSWER))
    first = client.chat.completions.create(model=MODEL, messages=USER, tools=[TOOL]).choices[0].message
    made = first.tool_calls[0]
    history = [
        *USER,
        {"role": "assistant", "content": first.content, "tool_calls": [made.model_dump()]},
        {"role": "tool", "tool_call_id": made.id, "content": "sunny"},
    ]
    client.chat.completions.create(model=MODEL, messages=history, tools=[TOOL])
    assert "<|open|>think<|sep|>hm<|close|>think<|sep|>" in prompt_of(server)


def respond(server: Server, client: openai.OpenAI, output: str, **fields):
    server.play(script(server, output), script(server, output))
    body = {"model": MODEL, "input": "Hi", **fields}
    return client.responses.create(**body), Events(client.responses.create(**body, stream=True))


def test_responses_answer(server: Server, client: openai.OpenAI):
    whole, streamed = respond(server, client, ANSWER)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert [item.type for item in streamed.final.output] == ["reasoning", "message"]
    assert whole.output_text == streamed.final.output_text == "Hello 😀"
    assert streamed.text("response.output_text.delta") == "Hello 😀"
    assert streamed.text("response.reasoning_text.delta") == "let me think"
    assert whole.output[0].content[0].text == "let me think"
    assert whole.usage.output_tokens_details.reasoning_tokens == len(ids_of(server, "let me think"))


def test_responses_call(server: Server, client: openai.OpenAI):
    whole, streamed = respond(server, client, CALL, tools=[FLAT_TOOL])
    for response in (whole, streamed.final):
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        made = response.output[-1]
        assert made.name == "weather" and json.loads(made.arguments) == ARGUMENTS and made.call_id
    assert json.loads(streamed.text("response.function_call_arguments.delta")) == ARGUMENTS
    assert whole.output[-1].call_id != streamed.final.output[-1].call_id


def test_responses_two_calls_and_a_lost_close(server: Server, client: openai.OpenAI):
    whole, streamed = respond(server, client, TWO, tools=[FLAT_TOOL])
    assert [item.type for item in whole.output] == ["function_call"] * 2
    assert [item.type for item in streamed.final.output] == ["function_call"] * 2
    assert len({item.call_id for item in streamed.final.output}) == 2
    whole, streamed = respond(server, client, LOST, tools=[FLAT_TOOL])
    for response in (whole, streamed.final):
        assert [item.type for item in response.output] == ["reasoning", "function_call"]


def test_responses_constrained(server: Server, client: openai.OpenAI):
    form = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER, "strict": True}}
    output = 'hm<C>think<S><O>response<S>{"city": "x"}<C>response<S>' + END
    whole, streamed = respond(server, client, output, text=form)
    assert whole.output_text == streamed.final.output_text == '{"city": "x"}'
    assert accepts(server, output) and not accepts(server, ANSWER)
    whole, streamed = respond(server, client, CALL, tools=[FLAT_TOOL], tool_choice="required")
    assert accepts(server, CALL) and not accepts(server, ANSWER)


def message(server: Server, claude: anthropic.Anthropic, output: str, cut: bool = False, **fields):
    server.play(script(server, output, cut=cut), script(server, output, cut=cut))
    body = {"model": MODEL, "messages": USER, "max_tokens": 500, **fields}
    return claude.messages.create(**body), Blocks(claude.messages.create(**body, stream=True))


def test_messages_answer(server: Server, claude: anthropic.Anthropic):
    whole, streamed = message(server, claude, ANSWER)
    assert [block.type for block in whole.content] == streamed.kinds == ["thinking", "text"]
    assert [text for _, text in streamed.blocks] == ["let me think", "Hello 😀"]
    assert whole.content[0].thinking == "let me think" and whole.content[1].text == "Hello 😀"
    assert whole.stop_reason == streamed.stop_reason == "end_turn"


@pytest.mark.parametrize("output", [CALL, LOST, TWO], ids=["call", "lost close", "two calls"])
def test_messages_call(server: Server, claude: anthropic.Anthropic, output: str):
    whole, streamed = message(server, claude, output, tools=[CLAUDE_TOOL])
    assert [block.type for block in whole.content] == streamed.kinds
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    inputs = [block.input for block in whole.content if block.type == "tool_use"]
    assert inputs and all(made["city"] == ARGUMENTS["city"] for made in inputs)
    assert [json.loads(text) for block, text in streamed.blocks if block.type == "tool_use"] == inputs


def test_messages_cut_call(server: Server, claude: anthropic.Anthropic):
    whole, streamed = message(server, claude, CUT, cut=True, tools=[CLAUDE_TOOL])
    assert whole.stop_reason == streamed.stop_reason == "max_tokens"
    assert not [block for block in whole.content if block.type == "tool_use"]
    assert streamed.blocks[-1][1] == '{"city": "Olo'


def test_messages_forced_tool(server: Server, claude: anthropic.Anthropic):
    whole, _ = message(server, claude, CALL, tools=[CLAUDE_TOOL], tool_choice={"type": "tool", "name": "weather"})
    assert whole.stop_reason == "tool_use" and whole.content[-1].input == ARGUMENTS
    assert accepts(server, CALL) and not accepts(server, ANSWER)
