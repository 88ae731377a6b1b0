"""A small client of an OpenAI-compatible server, which shows what a library hides: status, raw events, extra fields."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


class EndpointError(RuntimeError):
    """The server did not answer, or not as its interface says.

    Attributes:
        status: of the answer; 0 without one.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Message:
    """An assistant's turn, from a whole answer or put together from a stream.

    Attributes:
        content, reasoning: text; empty where there is none.
        calls: (id, name, arguments) of each tool call.
        finish: the finish reason.
        usage: token counts.
        logprobs: (token, logprob, [(token, logprob) of the most likely]) of each token, if asked for.
        token_ids, prompt_ids: if asked for and the server gives them.
    """

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[tuple[str, float, list[tuple[str, float]]]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)

    @property
    def text(self) -> tuple[str, str, list[tuple[str, str]], str | None]:
        """What a user gets of it; ids of calls differ from one answer to the next."""
        return self.reasoning, self.content, [(name, arguments) for _, name, arguments in self.calls], self.finish


class Client:
    """Talks to one model of one server.

    Args:
        url: of the server, with or without ``/v1``.
        key: API key, if it wants one.
        model: name; the first that the server lists if empty.
        timeout: seconds that an answer may take.
    """

    def __init__(self, url: str, key: str | None = None, model: str = "", timeout: float = 600) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout
        self.model = model or self.models()[0]

    def models(self) -> list[str]:
        """Names that the server lists; at least one.

        Raises:
            EndpointError: none, or no answer.
        """
        names = [entry["id"] for entry in self.get("/v1/models").get("data", [])]
        if not names:
            raise EndpointError("/v1/models lists no model")
        return names

    def get(self, path: str) -> Any:
        """JSON of a GET.

        Raises:
            EndpointError: no answer, an error status, or no JSON.
        """
        with self._open(path, None) as response:
            return _json(response.read())

    def post(self, path: str, body: Any) -> Any:
        """JSON of a POST; ``body`` is bytes, or something to be made JSON. Raises as :meth:`get`."""
        with self._open(path, body) as response:
            return _json(response.read())

    def chat(self, messages: list[dict[str, Any]], **request: Any) -> Message:
        """A chat completion; with ``stream=True`` put together from its events. Raises as :meth:`get`."""
        body = {"model": self.model, "messages": messages, **request}
        if not request.get("stream"):
            return _whole(self.post("/v1/chat/completions", body))
        body.setdefault("stream_options", {"include_usage": True})
        with self._open("/v1/chat/completions", body) as response:
            return _streamed(_events(response))

    def _open(self, path: str, body: Any) -> Any:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            raise EndpointError(f"{path}: {error.code} {text}", error.code) from error
        except OSError as error:
            raise EndpointError(f"{self.root}{path}: {error}") from error


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise EndpointError(f"expected JSON, found {raw[:80]!r}") from error


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The chunks of a stream, up to its end mark.

    Raises:
        EndpointError: the stream ends without the mark, or carries an error.
    """
    try:
        for line in response:
            data = line.decode().strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if line.startswith(b"data:"):
                chunk = _json(data.encode())
                if "error" in chunk:
                    raise EndpointError(f"error in the stream: {chunk['error']}")
                yield chunk
    except OSError as error:
        raise EndpointError(f"the stream broke off: {error}") from error
    raise EndpointError("the stream ended without [DONE]")


def _reasoning(part: dict[str, Any]) -> str:
    return part.get("reasoning") or part.get("reasoning_content") or ""


def _logprobs(choice: dict[str, Any]) -> list[tuple[str, float, list[tuple[str, float]]]]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    return [
        (e["token"], e["logprob"], [(t["token"], t["logprob"]) for t in e.get("top_logprobs", [])]) for e in entries
    ]


def _whole(answer: dict[str, Any]) -> Message:
    try:
        choice = answer["choices"][0]
        part = choice["message"]
    except (KeyError, IndexError, TypeError) as error:
        raise EndpointError(f"expected a choice with a message, found {str(answer)[:200]}") from error
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in part.get("tool_calls") or []
    ]
    return Message(
        part.get("content") or "",
        _reasoning(part),
        calls,
        choice.get("finish_reason"),
        answer.get("usage") or {},
        _logprobs(choice),
        choice.get("token_ids") or [],
        answer.get("prompt_token_ids") or [],
    )


def _streamed(chunks: Iterator[dict[str, Any]]) -> Message:
    message, calls = Message(), dict[int, list[str]]()
    for chunk in chunks:
        message.usage = chunk.get("usage") or message.usage
        for choice in chunk.get("choices", []):
            part = choice.get("delta") or {}
            message.content += part.get("content") or ""
            message.reasoning += _reasoning(part)
            message.finish = choice.get("finish_reason") or message.finish
            message.logprobs += _logprobs(choice)
            for call in part.get("tool_calls") or []:
                built = calls.setdefault(call["index"], ["", "", ""])
                function = call.get("function") or {}
                for place, piece in enumerate((call.get("id"), function.get("name"), function.get("arguments"))):
                    built[place] += piece or ""
    message.calls = [(identity, name, arguments) for identity, name, arguments in calls.values()]
    return message
