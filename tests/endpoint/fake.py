"""A scripted endpoint that does everything right, but for one planted fault."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOP = [{"token": "the", "logprob": -0.1}, {"token": "a", "logprob": -2.5}]


def count(text: str, fault: str) -> int:
    """Tokens of a text: words and signs; with the fault, a typed control token is one."""
    if fault == "control tokens":
        text = re.sub(r"<\|\w+\|>", "x", text)
    return len(re.findall(r"\w+|[^\w\s]", text))


class Handler(BaseHTTPRequestHandler):
    """Answers as the server's ``fault`` says."""

    server: "Fake"

    def log_message(self, *arguments: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.reply(200, {"data": [{"id": "k3"}]})
        else:
            self.reply(404, {"error": "no such path"})

    def do_POST(self) -> None:
        fault = self.server.fault
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            body = json.loads(raw)
            assert body["model"] == "k3"
            if self.path == "/v1/completions":
                self.read_at_once(body["prompt"], fault)
                return
            assert isinstance(body["messages"], list)
            assert body.get("max_tokens", 1) > 0 and not isinstance(body.get("temperature"), str)
            assert all(message["role"] in ("user", "assistant", "tool") for message in body["messages"])
        except (ValueError, KeyError, AssertionError) as error:
            if fault == "bad requests die":
                self.reply(500, {"error": repr(error)})
            elif fault == "bad requests pass":
                self.reply(200, {"choices": [{"message": {"content": "ok"}}]})
            else:
                self.reply(400, {"error": repr(error)})
            return
        self.server.requests += 1
        message, finish = self.message(body, fault)
        usage = {"prompt_tokens": self.prompt(body, fault), "completion_tokens": min(2, body["max_tokens"])}
        if fault == "limits":
            usage["completion_tokens"] = 99
        logprobs = {"content": [dict(TOP[0], top_logprobs=TOP)]}
        if fault == "warm" and self.server.requests == 2:
            message["content"] = "Something else."
            logprobs = {"content": [dict(TOP[1], top_logprobs=TOP)]}
        if body.get("stream"):
            self.stream(message, finish, usage, logprobs, fault)
        else:
            choice = {"message": message, "finish_reason": finish, "logprobs": logprobs}
            answer = {"choices": [choice], "usage": usage}
            if body.get("return_token_ids") and fault != "no token ids":
                choice["token_ids"] = [5, 6, 7]
                answer["prompt_token_ids"] = [1, 2]
            self.reply(200, answer)

    def read_at_once(self, ids: list[int], fault: str) -> None:
        """Logprobs of a prompt: each token is the most likely one, or with the fault another is."""
        entries: list[Any] = [None]
        for token in ids[1:]:
            entries.append({str(token): {"logprob": -0.1}, "99": {"logprob": -0.05 if fault != "speculation" else 3.0}})
        self.reply(200, {"choices": [{"prompt_logprobs": entries}]})

    def message(self, body: dict[str, Any], fault: str) -> tuple[dict[str, Any], str]:
        if body.get("tool_choice") != "required":
            return {"content": "It is so.", "reasoning": "Let me see."}, "stop"
        if fault == "no call":
            return {"content": "I will not."}, "stop"
        name = "delete_all" if fault == "undeclared call" else "record_reading"
        arguments = '{"sensor": ' if fault == "broken arguments" else '{"sensor": "north-3", "value": 41}'
        identity = "" if fault == "no id" else "call_1"
        return {
            "tool_calls": [{"index": 0, "id": identity, "function": {"name": name, "arguments": arguments}}]
        }, "tool_calls"

    def prompt(self, body: dict[str, Any], fault: str) -> int:
        fields = ["content"] + ([] if fault == "thinking dropped" else ["reasoning", "reasoning_content"])
        if fault == "one name only":
            fields.remove("reasoning_content")
        return sum(count(str(message.get(field) or ""), fault) for message in body["messages"] for field in fields)

    def stream(self, message: dict[str, Any], finish: str, usage: Any, logprobs: Any, fault: str) -> None:
        self.send_response(200)
        self.end_headers()
        if fault == "stream" and message.get("content"):
            message["content"] += "<|close|>message<|sep|>"
            logprobs = {"content": []}
        chunks = [{"choices": [{"delta": {name: value}}]} for name, value in message.items()]
        chunks.append({"choices": [{"delta": {}, "finish_reason": finish, "logprobs": logprobs}], "usage": usage})
        for chunk in chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        if fault != "no end":
            self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


class Fake(ThreadingHTTPServer):
    """Serves on a loopback port within a with-block."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.requests = fault, 0
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "Fake":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()
