"""The cache seen from outside: its path, its metrics, readiness; with engines that answer, are slow, or are dead."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from vllm_kimi_k3.cache import metrics
from vllm_kimi_k3.cache.status import CacheStatus
from vllm_kimi_k3.cache.view import COUNTED
from vllm_kimi_k3.compat.server import ask_engines, patch_guarded_paths


def seen(ready: bool = True, hits: int = 0, held: int = 0) -> dict[str, Any]:
    """A view; ``hits`` tokens were restored since the one before."""
    counts = {family: dict.fromkeys(labels, 0) for family, labels in COUNTED.items()}
    kinds = dict.fromkeys(COUNTED["kept"], 0)
    return {
        "ready": ready,
        "pool": {"blocks": 10, "free_blocks": 9, "withheld_blocks": 0, "block_bytes": 7},
        "states": {
            "held": kinds | {"fork": held},
            "bytes": kinds | {"fork": 7 * held},
            "blocks": held,
            "budget_blocks": 7,
        },
        "counts": counts,
        "since_last_view": counts | {"tokens": counts["tokens"] | {"hit": hits}},
    }


def status(answer: Any, patience: float = 1.0) -> CacheStatus:
    """A status over an application that answers 200 with the path it was asked for."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async def ask(app: Any) -> Any:
        value = answer() if callable(answer) else answer
        return await value if asyncio.iscoroutine(value) else value

    return CacheStatus(app, ask, patience)


async def get(status: CacheStatus, path: str, method: str = "GET", root: str = "") -> tuple[int, str]:
    sent: list[Any] = []

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "path": root + path, "root_path": root, "method": method, "app": None}
    await status(scope, None, send)  # type: ignore[arg-type]
    return sent[0]["status"], sent[1]["body"].decode()


def fetch(status: CacheStatus, path: str, **options: str) -> tuple[int, str]:
    return asyncio.run(get(status, path, **options))


@pytest.mark.parametrize("root", ["", "/behind/a/proxy"])
def test_the_view_of_every_engine(root: str) -> None:
    code, body = fetch(status(("k3", {1: seen(held=2), 0: seen()})), "/k3/cache", root=root)
    assert code == 200
    first, second = json.loads(body)["engines"]
    assert (first["engine"], second["engine"]) == (0, 1)
    assert second["states"]["held"]["fork"] == 2
    assert "since_last_view" not in first


def test_other_paths_ask_nobody() -> None:
    def ask() -> Any:
        raise AssertionError

    for path in ("/v1/chat/completions", "/k3/other", "/version"):
        assert fetch(status(ask), path) == (200, path)


def test_only_get_is_served() -> None:
    code, body = fetch(status(("k3", {0: seen()})), "/k3/cache", method="POST")
    assert code == 405 and "only GET" in body


def test_without_our_cache_the_path_says_how_to_turn_it_on() -> None:
    code, body = fetch(status(None), "/k3/cache")
    assert code == 404 and "--enable-prefix-caching" in body


def test_readiness_goes_and_comes_back() -> None:
    views = iter([seen(), seen(ready=False), seen()])
    watched = status(lambda: ("k3", {0: seen(), 1: next(views)}))
    assert [fetch(watched, "/health")[0] for _ in range(3)] == [200, 503, 200]
    unready = status(("k3", {0: seen(ready=False)}))
    assert "not finite" in json.loads(fetch(unready, "/health")[1])["reason"]
    assert fetch(unready, "/metrics")[0] == 200


def test_a_dead_engine_is_left_to_vllms_own_check() -> None:
    def dead() -> Any:
        raise RuntimeError("the engine is dead")

    assert fetch(status(dead), "/health")[0] == 200
    assert fetch(status(dead), "/k3/cache")[0] == 503


def test_a_slow_engine_holds_nobody_up_and_its_answer_still_counts() -> None:
    asked = []

    async def slow() -> Any:
        asked.append(1)
        await asyncio.sleep(0.3)
        return "slow", {0: seen(hits=5, ready=False)}

    async def run() -> None:
        watched = status(slow, patience=0.05)
        assert [code for code, _ in await asyncio.gather(get(watched, "/health"), get(watched, "/metrics"))] == [
            200,
            200,
        ]
        assert (await get(watched, "/k3/cache"))[0] == 503
        assert len(asked) == 1
        await asyncio.sleep(0.4)
        assert value("slow", "prompt_tokens_total", outcome="hit") == 5
        assert (await get(watched, "/health"))[0] == 503

    asyncio.run(run())


def value(model: str, name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(
        f"vllm:kimi_k3_cache_{name}", {"model_name": model, "engine": labels.pop("engine", "0"), **labels}
    )


def test_counters_add_up_what_each_view_brings_and_gauges_show_the_last() -> None:
    views = iter([seen(hits=128, held=3), seen(hits=256, held=1)])
    watched = status(lambda: ("adds", {0: next(views), 1: seen(hits=1, ready=False)}))
    for _ in range(2):
        fetch(watched, "/metrics")
    assert value("adds", "prompt_tokens_total", outcome="hit") == 384
    assert value("adds", "prompt_tokens_total", outcome="hit", engine="1") == 2
    assert value("adds", "prompt_tokens_total", outcome="guard") == 0
    assert value("adds", "states", kind="fork") == 1
    assert value("adds", "state_bytes", kind="fork") == 7
    assert value("adds", "state_blocks") == 1
    assert value("adds", "ready") == 1
    assert value("adds", "ready", engine="1") == 0


def test_every_family_of_the_view_has_a_counter() -> None:
    assert set(metrics.COUNTERS) == set(COUNTED)


def test_engines_are_asked_by_rank_and_only_where_there_is_a_cache() -> None:
    called: list[str] = []

    async def call_utility_all_async(name: str) -> list[Any]:
        called.append(name)
        return [seen(), None]

    core = SimpleNamespace(call_utility_all_async=call_utility_all_async, engine_ranks_managed=[4, 5])

    def app(caching: bool) -> Any:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
            model_config=SimpleNamespace(served_model_name="k3"),
        )
        return SimpleNamespace(
            state=SimpleNamespace(engine_client=SimpleNamespace(vllm_config=config, engine_core=core))
        )

    assert asyncio.run(ask_engines(app(caching=False))) is None
    assert not called
    assert asyncio.run(ask_engines(app(caching=True))) == ("k3", {4: seen()})
    assert called == ["kimi_k3_cache"]


@pytest.mark.parametrize(("key", "code"), [(None, 401), ("wrong", 401), ("right", 200)])
def test_a_servers_api_key_guards_the_path_as_vllms_guards_its_own(key: str | None, code: int) -> None:
    from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

    patch_guarded_paths()
    patch_guarded_paths()
    guarded = AuthenticationMiddleware(status(("k3", {0: seen()})), ["right"])  # type: ignore[arg-type]
    sent: list[Any] = []

    async def run() -> None:
        async def send(event: Any) -> None:
            sent.append(event)

        headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        scope = {"type": "http", "path": "/k3/cache", "method": "GET", "headers": headers, "app": None}
        await guarded(scope, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    assert sent[0]["status"] == code
