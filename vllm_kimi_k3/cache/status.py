"""The cache from outside: ``GET /k3/cache``, metrics that are up to date when scraped, readiness in ``/health``."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_kimi_k3.cache import metrics

PATH = "/k3/cache"
#: An engine answers between two steps; so many seconds are waited for it, then what is known already has to do.
PATIENCE = 2.0
_HEALTH = ("/health", "/ping")
_UNREADY = "logits that are not finite recur; see the log and " + PATH

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]
#: the server's application to the served model's name and each engine's view; None where the cache is not ours
Ask = Callable[[Any], Awaitable[tuple[str, dict[int, dict[str, Any]]] | None]]

logger = logging.getLogger("vllm.vllm_kimi_k3")


class CacheStatus:
    """ASGI middleware that asks the engines for their cache's numbers where a path is about them.

    Args:
        app: what serves all other paths.
        ask: asks the engines of the server's application.
        patience: seconds that a request waits for them.
    """

    def __init__(self, app: App, ask: Ask, patience: float = PATIENCE) -> None:
        self._app = app
        self._ask = ask
        self._patience = patience
        self._views: dict[int, dict[str, Any]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or not path.startswith((PATH, "/metrics", *_HEALTH)):
            await self._app(scope, receive, send)
            return
        current = await self._refresh(scope["app"])
        if path == PATH:
            await self._show(current, scope["method"], send)
        elif path in _HEALTH and any(not view["ready"] for view in self._views.values()):
            await _reply(send, 503, {"status": "not ready", "reason": _UNREADY})
        else:
            await self._app(scope, receive, send)

    async def _show(self, current: bool, method: str, send: Send) -> None:
        if method not in ("GET", "HEAD"):
            await _reply(send, 405, {"error": f"{method} {PATH}: only GET is served"})
        elif not current:
            await _reply(send, 503, {"error": f"the engine did not answer within {self._patience:g} s; try again"})
        elif not self._views:
            await _reply(send, 404, {"error": "no prefix cache of this plugin: --enable-prefix-caching turns it on"})
        else:
            engines = [
                {"engine": engine} | {name: part for name, part in view.items() if name != "since_last_view"}
                for engine, view in sorted(self._views.items())
            ]
            await _reply(send, 200, {"engines": engines})

    async def _refresh(self, app: Any) -> bool:
        """Ask the engines, all requests of the moment together; whether they answered in time."""
        if self._asking is None or self._asking.done():
            # The answer is counted even if this request's client does not wait for it.
            self._asking = asyncio.create_task(self._learn(app))
        done, _ = await asyncio.wait([self._asking], timeout=self._patience)
        return bool(done) and self._asking.exception() is None

    async def _learn(self, app: Any) -> None:
        try:
            answer = await self._ask(app)
        except Exception:
            # A dead engine, or one that shuts down: vLLM's own health check says so.
            logger.debug("the engine gave no view of its cache", exc_info=True)
            raise
        if answer is None:
            return
        model, self._views = answer
        for engine, view in self._views.items():
            metrics.record(model, engine, view)


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
