import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

from vllm_kimi_k3.chat import scope
from vllm_kimi_k3.chat.scope import RequestScope, ScopeMiddleware, tenant_of


class Seen:
    """An application that notes what reaches it."""

    def __init__(self) -> None:
        self.body = b""
        self.scopes: list[RequestScope | None] = []

    async def __call__(self, asgi: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope.current.get())
        if asgi["type"] == "http":
            event = await receive()
            self.body = event.get("body", b"")
            assert not event.get("more_body")
        # A task of the request, such as a streamed response, sees the same scope.
        self.scopes.append(await asyncio.create_task(self._later()))

    async def _later(self) -> RequestScope | None:
        return scope.current.get()


def run(asgi: dict[str, Any], *events: MutableMapping[str, Any]) -> Seen:
    seen = Seen()
    pending = list(events)

    async def receive() -> MutableMapping[str, Any]:
        return pending.pop(0)

    async def send(event: MutableMapping[str, Any]) -> None:
        raise AssertionError(event)

    async def serve() -> None:
        await ScopeMiddleware(seen)(asgi, receive, send)

    asyncio.run(serve())
    return seen


def http(path: str, key: str = "k") -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": path, "headers": [(b"authorization", key.encode())]}


def test_a_request_and_its_tasks_share_one_scope() -> None:
    seen = run(http("/v1/messages"), {"type": "http.request", "body": b"x"})
    first, second = seen.scopes
    assert first is not None and first is second
    assert first.tenant == tenant_of([(b"Authorization", b"k")])
    assert seen.body == b"x"


def test_keys_differ_and_are_not_kept() -> None:
    anna, bert, nobody = (tenant_of(h) for h in ([(b"x-api-key", b"anna")], [(b"x-api-key", b"bert")], []))
    assert len({anna, bert, nobody}) == 3 and b"anna" not in anna


def test_a_chat_body_in_pieces_arrives_whole_and_loosened() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    body = json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()
    pieces: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": body[:20], "more_body": True},
        {"type": "http.request", "body": body[20:]},
    ]
    seen = run(http("/v1/chat/completions"), *pieces)
    assert json.loads(seen.body)["messages"][0]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_a_client_that_left_is_reported() -> None:
    seen = run(
        http("/v1/chat/completions"),
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    )
    assert seen.body == b""


def test_other_protocols_pass() -> None:
    assert run({"type": "lifespan"}).scopes == [None, None]
