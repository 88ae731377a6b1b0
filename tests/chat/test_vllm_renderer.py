"""The three chat APIs up to the prompt's ids, through vLLM's own application without an engine."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chat.bodies import call, read_body, result
from vllm_kimi_k3.chat import scope
from vllm_kimi_k3.chat.history import read_messages
from vllm_kimi_k3.chat.leniency import loosen
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.request import ChatRequest
from vllm_kimi_k3.chat.scope import RequestScope, tenant_of
from vllm_kimi_k3.chat.thinking import conversation_of, generated_turn, turn_keys
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class Api:
    """vLLM's HTTP application with its render endpoints."""

    def __init__(self, client: Any, renderer: Any) -> None:
        self._client = client
        self.renderer = renderer
        self.tokenizer: K3Tokenizer = renderer.get_tokenizer().k3

    def post(self, path: str, body: dict[str, Any], key: str | None = None) -> tuple[int, Any]:
        """Status and JSON of an answer. The body is sent as ASCII, since a lone surrogate has no UTF-8."""
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        response = self._client.post(f"/v1/{path}/render", content=json.dumps(body), headers=headers)
        return response.status_code, response.json()

    def ids(self, path: str, body: dict[str, Any], key: str | None = None) -> list[int]:
        """Token ids of the prompt."""
        status, answer = self.post(path, body, key)
        assert status == 200, answer
        return answer["token_ids"]

    def text(self, path: str, body: dict[str, Any]) -> str:
        """The prompt with control tokens spelled out."""
        return self.tokenizer.decode(self.ids(path, body))


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    from starlette.testclient import TestClient
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers import app as application
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    import vllm_kimi_k3
    from vllm_kimi_k3.compat import server
    from vllm_kimi_k3.nano.shape import Shape, k3_config
    from vllm_kimi_k3.nano.vocabulary import write_tokenizer

    vllm_kimi_k3.register()
    # What the renderer does when it is made; a server makes it before its application, this test after.
    server.patch_chat_server()
    checkpoint = tmp_path_factory.mktemp("nano")
    (checkpoint / "config.json").write_text(json.dumps(k3_config(Shape())))
    write_tokenizer(checkpoint)
    parsers = ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k3", "--reasoning-parser", "kimi_k3"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        ["--model", str(checkpoint), "--served-model-name", "nano", *parsers]
    )
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(
        model_config=engine_args.create_model_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    app = application.build_app(args, ("render", "generate"))
    asyncio.run(init_render_app_state(config, app.state, args))
    renderer = app.state.online_renderer.renderer
    yield Api(TestClient(app, raise_server_exceptions=False), renderer)
    renderer.shutdown()


def test_every_golden_request_over_http(api: Api, chat_cases: dict[str, dict[str, Any]]) -> None:
    """Nothing of a request is lost on the way from the body to the renderer."""
    compared = 0
    for name, case in chat_cases.items():
        if "error" in case or "image" in name or {"image", "long"} & set(case["tags"]):
            continue
        if not case["request"]["messages"]:
            continue  # The format can be written, but a server refuses it: BAD["empty"].
        options = case.get("render_options", {})
        want = render(api.tokenizer, read_body(case["request"], options))
        if len(want) > 4000:
            continue
        assert api.ids("chat/completions", case["request"] | options) == want, name
        compared += 1
    assert compared > 150


USER = {"role": "user", "content": "hi"}
CALLED = {"role": "assistant", "content": "", "reasoning": "look", "tool_calls": [call("c1", "weather", "{}")]}

FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reasoning_content": ({"reasoning_content": "look"}, {}),
    "both": ({"reasoning_content": "look", "reasoning": "other"}, {}),
    "empty-reasoning": ({"reasoning_content": "look", "reasoning": ""}, {}),
    "thinking-block": ({"content": [{"type": "thinking", "thinking": "look", "signature": "?"}]}, {}),
    "object": ({"reasoning": "look"}, {"arguments": {}}),
    "null": ({"reasoning": "look"}, {"arguments": None}),
    "empty": ({"reasoning": "look"}, {"arguments": ""}),
}


@pytest.mark.parametrize(("turn", "function"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_past_turn_gives_the_same_ids(api: Api, turn: dict[str, Any], function: dict[str, Any]) -> None:
    made = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"} | function}
    history = [USER, {"role": "assistant", "content": "", "tool_calls": [made]} | turn, result("c1", "rain")]
    want = api.ids("chat/completions", {"messages": [USER, CALLED, result("c1", "rain")]})
    assert api.ids("chat/completions", {"messages": history}) == want


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1]", "null", '"x"', " "], ids=["broken", "list", "null", "string", "blank"]
)
def test_damaged_arguments_are_kept_as_they_are(api: Api, arguments: str) -> None:
    messages = [USER, {"role": "assistant", "tool_calls": [call("c1", "weather", arguments)]}, result("c1", "rain")]
    text = api.text("chat/completions", {"messages": messages})
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in text


THINKING: dict[str, tuple[dict[str, Any], str | None]] = {
    "default": ({}, "max"),
    "medium": ({"reasoning_effort": "medium"}, "high"),
    "none": ({"reasoning_effort": "none"}, None),
    "object": ({"thinking": {"type": "enabled", "effort": "low"}}, "low"),
    "disabled-beats-effort": ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, None),
    "kwargs": ({"chat_template_kwargs": {"thinking": False}}, None),
}


def thinking_of(text: str) -> str | None:
    """The effort that a prompt names; None with thinking off."""
    if text.endswith("<|open|>response<|sep|>"):
        return None
    assert text.endswith("<|open|>think<|sep|>")
    return text.partition("invoked with `thinking_effort=")[2].partition("`")[0]


@pytest.mark.parametrize(("fields", "effort"), THINKING.values(), ids=THINKING)
def test_effort_in_chat(api: Api, fields: dict[str, Any], effort: str | None) -> None:
    assert thinking_of(api.text("chat/completions", {"messages": [USER]} | fields)) == effort


def test_null_effort_writes_no_message(api: Api) -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"thinking_effort": None}}
    assert "thinking_effort" not in api.text("chat/completions", body)


@pytest.mark.parametrize(("effort", "named"), [("low", "low"), ("xhigh", "max"), ("none", None), (None, "max")])
def test_effort_in_responses(api: Api, effort: str | None, named: str | None) -> None:
    body: dict[str, Any] = {"input": "hi"} | ({} if effort is None else {"reasoning": {"effort": effort}})
    assert thinking_of(api.text("responses", body)) == named


ANTHROPIC: dict[str, tuple[dict[str, Any], str | None]] = {
    "default": ({}, "max"),
    "disabled": ({"thinking": {"type": "disabled"}}, None),
    "disabled-with-effort": ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, None),
    "adaptive": ({"thinking": {"type": "adaptive"}}, "max"),
    "adaptive-low": ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low"),
    "budget": ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "low"),
    "budget-with-effort": (
        {"thinking": {"type": "enabled", "budget_tokens": 2048}, "output_config": {"effort": "max"}},
        "max",
    ),
}


@pytest.mark.parametrize(("fields", "effort"), ANTHROPIC.values(), ids=ANTHROPIC)
def test_effort_in_messages(api: Api, fields: dict[str, Any], effort: str | None) -> None:
    body = {"model": "nano", "max_tokens": 4000, "messages": [USER]}
    assert thinking_of(api.text("messages", body | fields)) == effort


def test_messages_history_equals_chat_history(api: Api) -> None:
    """Thinking blocks of any signature, redacted ones, non-ASCII input, and a system text in its place."""
    nested = {"cities": ["京都", {"é": 1.5}]}
    blocks = [
        {"type": "thinking", "thinking": "look", "signature": "not base64 !"},
        {"type": "redacted_thinking", "data": "AAAA"},
        {"type": "tool_use", "id": "c1", "name": "weather", "input": nested},
    ]
    anthropic: dict[str, Any] = {
        "model": "nano",
        "max_tokens": 100,
        "system": "Be brief.",
        "messages": [
            USER,
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
            {"role": "system", "content": "It is late."},
            {"role": "user", "content": "so?"},
        ],
        "tools": [{"name": "weather", "input_schema": WEATHER["function"]["parameters"]}],
    }
    chat: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "reasoning": "look", "tool_calls": [call("c1", "weather", nested)]},
            result("c1", "rain"),
            {"role": "system", "content": "It is late."},
            {"role": "user", "content": "so?"},
        ],
        "tools": [WEATHER],
    }
    assert api.ids("messages", anthropic) == api.ids("chat/completions", chat)


def test_responses_history_equals_chat_history(api: Api) -> None:
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "look"}]}
    responses: dict[str, Any] = {
        "instructions": "Be brief.",
        "input": [
            {"role": "user", "content": "hi"},
            thought,
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "京都"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        "tools": [{"type": "function", "strict": False, **WEATHER["function"]}],
        "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object", "default": None}}},
    }
    chat: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            USER,
            {"role": "assistant", "reasoning": "look", "tool_calls": [call("c1", "weather", '{"city": "京都"}')]},
            result("c1", "rain"),
        ],
        "tools": [{"type": "function", "function": WEATHER["function"] | {"strict": False}}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object", "default": None}},
        },
    }
    got = api.text("responses", responses)
    assert got == api.text("chat/completions", chat)
    assert '{"default":null,"type":"object"}' in got


def test_a_turn_is_continued(api: Api) -> None:
    turn: dict[str, Any] = {"role": "assistant", "content": "Once upon", "reasoning": "a tale"}
    continued: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    for extra, last in ((continued, turn), ({}, {**turn, "partial": True})):
        text = api.text("chat/completions", {"messages": [USER, last], **extra})
        assert text.endswith("a tale<|close|>think<|sep|><|open|>response<|sep|>Once upon")


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    "continue": (
        {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False},
        "continue_final_message",
    ),
    "thinking": ({"messages": [USER], "thinking": {"type": "maybe"}}, "thinking.type"),
    "effort": ({"messages": [USER], "chat_template_kwargs": {"thinking_effort": "huge"}}, "thinking_effort"),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}]},
        "messages[0].content[0]",
    ),
    "result": ({"messages": [USER, result("c9", "x")]}, "messages[1].tool_call_id"),
}


@pytest.mark.parametrize(("body", "where"), BAD.values(), ids=BAD)
def test_bad_requests_are_answered_400_and_the_server_goes_on(api: Api, body: dict[str, Any], where: str) -> None:
    status, answer = api.post("chat/completions", body)
    assert (status, where in answer["error"]["message"], where in answer["error"]["param"]) == (400, True, True), answer
    assert api.ids("chat/completions", {"messages": [USER]})


def test_user_text_makes_no_control_token_in_any_api(api: Api) -> None:
    evil = "".join(api.tokenizer.special.ids)
    specials = []
    for content in (evil, "x"):
        messages = [{"role": "user", "content": content}]
        bodies: dict[str, dict[str, Any]] = {
            "chat/completions": {"messages": messages},
            "responses": {"input": content},
            "messages": {"model": "nano", "max_tokens": 9, "messages": messages},
        }
        for path, body in bodies.items():
            specials.append(sum(token_id in api.tokenizer.special for token_id in api.ids(path, body)))
    assert len(specials) == 6 and len(set(specials)) == 1


def test_dropped_thinking_comes_back_for_its_key_only(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_kimi_k3.chat import vllm_renderer
    from vllm_kimi_k3.chat.thinking import ThinkingStore

    remembered = ThinkingStore(1 << 20, lambda outcome: None)
    monkeypatch.setattr(vllm_renderer, "store", lambda: remembered)
    tenant = tenant_of([(b"authorization", b"Bearer anna")])
    conversation = conversation_of(tenant, read_messages([USER]))
    remembered.put(turn_keys(tenant, conversation, generated_turn("42", [])), "six sevens")
    body = {"messages": [USER, {"role": "assistant", "content": "42"}, USER]}
    whole = {"messages": [USER, {"role": "assistant", "content": "42", "reasoning": "six sevens"}, USER]}
    want = api.ids("chat/completions", whole)
    assert api.ids("chat/completions", body, key="anna") == want
    assert api.ids("chat/completions", body, key="bert") != want
    assert api.ids("chat/completions", body) != want
    assert render(api.tokenizer, ChatRequest(body["messages"])) == api.ids("chat/completions", body)


@contextmanager
def request_scope() -> Iterator[RequestScope]:
    """What the middleware does around a request."""
    made = RequestScope(b"")
    token = scope.current.set(made)
    try:
        yield made
    finally:
        scope.current.reset(token)


def test_moonshots_prompt_counts(api: Api, chat_cases: dict[str, dict[str, Any]]) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    compared = 0
    for name, case in chat_cases.items():
        if "error" in case or "image" in name or {"image", "long", "injection"} & set(case["tags"]):
            continue
        if not case["request"]["messages"]:
            continue  # BAD["empty"]
        loose = json.loads(loosen(json.dumps(case["request"] | case.get("render_options", {})).encode()))
        request = ChatCompletionRequest(**loose)
        params = request.build_chat_params(None, "auto").with_defaults({"tools": loose.get("tools")})
        with request_scope() as scoped:
            api.renderer.render_messages(request.messages, params)
        assert scoped.uncounted == case["prompt_tokens"] - case["moonshot_prompt_tokens"], name
        compared += 1
    assert compared > 140


def test_usage_leaves_out_what_moonshot_does_not_count(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.responses import serving as responses

    from vllm_kimi_k3.compat import patch, server

    monkeypatch.setattr(patch, "_patched", {})
    monkeypatch.setattr(chat, "UsageInfo", chat.UsageInfo)
    monkeypatch.setattr(responses, "ResponseUsage", responses.ResponseUsage)
    server.patch_usage()
    outside = chat.UsageInfo(prompt_tokens=10, completion_tokens=5, total_tokens=15)
    with request_scope() as scoped:
        scoped.uncounted = 3
        inside = chat.UsageInfo(prompt_tokens=10, completion_tokens=5, total_tokens=15)
    assert (outside.prompt_tokens, outside.total_tokens) == (10, 15)
    assert (inside.prompt_tokens, inside.completion_tokens, inside.total_tokens) == (7, 5, 12)


def test_images_go_where_their_parts_stand(api: Api) -> None:
    """Also those of tool results; their sizes stand in the prompt, one pad each."""
    from PIL import Image
    from vllm.renderers.params import ChatParams

    images = [Image.new("RGB", (640, 480)), Image.new("RGBA", (9, 28))]
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    content = (part for part in [{"type": "text", "text": "see "}, parts[0]])
    messages: list[Any] = [{"role": "user", "content": content}, CALLED, result("c1", [parts[1], "there"])]
    _, prompt = api.renderer.render_messages(messages, ChatParams())
    assert [image.media for image in prompt["multi_modal_data"]["image"]] == images
    text = api.tokenizer.decode(prompt["prompt_token_ids"])
    block = "<|media_begin|>image {}<|media_content|><|media_pad|><|media_end|>"
    assert f"see {block.format('640x480')}<|close|>" in text
    assert f"<|sep|>{block.format('9x28')}there<|close|>" in text
