"""What the renderer and the parser of one HTTP request share: who asks, and which conversation was rendered.

vLLM hands neither of them the request's headers. A small ASGI middleware puts a `RequestScope` into a context variable
before vLLM sees the request; both find it there, in whatever task of the request they run.
"""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any

from vllm_kimi_k3.chat.identity import digest
from vllm_kimi_k3.chat.leniency import loosen

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]

_CREDENTIALS = (b"authorization", b"x-api-key")
_LENIENT_PATHS = ("/chat/completions", "/chat/completions/batch", "/chat/completions/render", "/tokenize")

current: ContextVar["RequestScope | None"] = ContextVar("kimi_k3_request", default=None)


class RequestScope:
    """One HTTP request. `tenant` is a digest of its API key; the same for all requests that carry none."""

    def __init__(self, tenant: bytes) -> None:
        self.tenant = tenant
        #: Prompt tokens that Moonshot's service would not count.
        self.uncounted = 0
        self._conversations: set[bytes] = set()

    def rendered(self, conversation: bytes | None) -> None:
        """Note the conversation that the model is to go on with; None for one whose answer is not a turn of its own."""
        self._conversations.add(conversation or b"")

    @property
    def conversation(self) -> bytes | None:
        """The conversation of the request; None if it rendered none, or several, whose answers cannot be told apart."""
        return next(iter(self._conversations)) or None if len(self._conversations) == 1 else None


def tenant_of(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Digest of a request's credentials."""
    return digest(b"tenant", *(value for name, value in headers if name.lower() in _CREDENTIALS))


class ScopeMiddleware:
    """ASGI middleware: opens a `RequestScope` for each HTTP request and loosens the body of chat requests."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        current.set(RequestScope(tenant_of(scope["headers"])))
        if scope["method"] == "POST" and scope["path"].endswith(_LENIENT_PATHS):
            receive = await _replay_loosened(receive)
        await self._app(scope, receive, send)


async def _replay_loosened(receive: Receive) -> Receive:
    """Read the whole body, loosen it, and give it out again in one piece."""
    parts: list[bytes] = []
    while True:
        event = await receive()
        if event["type"] != "http.request":
            # The client is gone; let the application see that.
            break
        parts.append(event.get("body", b""))
        if not event.get("more_body"):
            event = {"type": "http.request", "body": loosen(b"".join(parts)), "more_body": False}
            break
    pending: list[MutableMapping[str, Any]] = [event]

    async def replay() -> MutableMapping[str, Any]:
        return pending.pop() if pending else await receive()

    return replay
