"""The score card: against a stand-in that knows the answers, and with the packaged miniature itself."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from vllm_kimi_k3.cli.main import main
from vllm_kimi_k3.nano.exam import TARGETS, questions
from vllm_kimi_k3.nano.score import score
from vllm_kimi_k3.nano.tasks.exchange import Turn

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@contextmanager
def _endpoint(answer: Answer) -> Iterator[str]:
    """A chat completions endpoint that answers a request with a message."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"object": "list", "data": [{"id": "nano", "object": "model", "created": 0, "owned_by": "me"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": None} | answer(request)
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send({"id": "1", "object": "chat.completion", "created": 0, "model": "nano", "choices": [choice]})

        def _send(self, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _said(messages: list[dict[str, Any]]) -> str:
    return json.dumps([(message["role"], message["content"]) for message in messages])


def _as_message(turn: Turn) -> dict[str, Any]:
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for n, call in enumerate(turn.calls)
    ]
    return {"content": turn.content or None, "reasoning": turn.reasoning or None, "tool_calls": calls}


@pytest.fixture(scope="module")
def key() -> dict[str, Turn]:
    """The right message for each conversation of the first three questions of a skill."""
    return {_said(q.dialogue.messages): q.expected for row in TARGETS for q in questions(row, 3, seed=1)}


def test_right_answers_count_and_history_is_sent_whole(key: dict[str, Turn]) -> None:
    requests: list[dict[str, Any]] = []

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        return _as_message(key[_said(request["messages"])])

    with _endpoint(answer) as url:
        rows = list(score(url, 3))
    assert [(row.skill, row.right, row.total) for row in rows] == [(skill, 3, 3) for skill in TARGETS]
    # Whoever knows what was dropped must have seen it.
    assert [row.skill for row in rows if not row.passed] == ["other two, thinking dropped"]
    assert {request["reasoning_effort"] for request in requests} <= {"none", "low", "high", "max"}
    history = [message for request in requests for message in request["messages"] if message["role"] == "assistant"]
    assert any(message["reasoning"] for message in history)
    calls = [call for message in history for call in message.get("tool_calls", ())]
    assert calls
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "I do not know."},
        {"content": None},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "get_time", "arguments": "{'a': 1}"}}]},
    ],
    ids=["other", "empty", "broken call"],
)
def test_wrong_answers_do_not_count(message: dict[str, Any]) -> None:
    with _endpoint(lambda request: message) as url:
        rows = list(score(url, 3))
    # Where nobody asked for thinking, any text at all is right grammar.
    assert [row.skill for row in rows if row.right and row.skill != "grammar"] == []
    assert rows[0].right < rows[0].total


def test_command_prints_the_card_and_tells_by_its_status(
    key: dict[str, Turn], capsys: pytest.CaptureFixture[str]
) -> None:
    with _endpoint(lambda request: _as_message(key[_said(request["messages"])])) as url:
        assert main(["nano", "score", "--url", f"{url}/v1/", "--questions", "2", "--json"]) == 1
    card = json.loads(capsys.readouterr().out)
    assert [(row["skill"], row["right"]) for row in card] == [(skill, 2) for skill in TARGETS]
    with _endpoint(lambda request: {"content": "no"}) as url:
        assert main(["nano", "score", "--url", url, "--questions", "1", "--failed"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("not reached") >= 6
    assert "wanted Turn(" in printed.err


def test_a_missing_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with _endpoint(lambda request: {}) as url:
        pass
    assert main(["nano", "score", "--url", url, "--questions", "1"]) == 2
    assert url in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.server
def test_packaged_miniature_reaches_its_scores(capsys: pytest.CaptureFixture[str]) -> None:
    main(["nano", "score", "--questions", "6", "--json"])
    card = {row["skill"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(card) == set(TARGETS)
    # With six questions one slip is 17 %; the full card is in docs/nano.md.
    for skill, row in card.items():
        assert row["right"] >= row["least"] * row["total"] - 1, skill
        assert row["right"] <= row["most"] * row["total"] + 1, skill
