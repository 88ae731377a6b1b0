"""The cache's numbers as Prometheus metrics, in the registry that vLLM's API server exposes."""

from functools import cache
from typing import Any, NamedTuple

_PREFIX = "vllm:kimi_k3_cache_"
_BY_ENGINE = ("model_name", "engine")


class Counted(NamedTuple):
    """A counter: its name without ``_total``, what its one label is called, what it counts."""

    name: str
    label: str
    about: str


class Held(NamedTuple):
    """A gauge: its name, where its value or values stand in the view, its label if it has one, what it shows."""

    name: str
    path: tuple[str, str]
    label: str | None
    about: str


#: family of the view's counts to its counter
COUNTERS = {
    "tokens": Counted(
        _PREFIX + "prompt_tokens", "outcome", "Prompt tokens restored from the prefix cache, or missed and why."
    ),
    "restores": Counted(_PREFIX + "restores", "outcome", "Restores from the prefix cache, done and refused."),
    "kept": Counted(_PREFIX + "states_kept", "kind", "KDA states that were entered, by why they are kept."),
    "dropped": Counted(_PREFIX + "states_dropped", "reason", "KDA states that were given up, by reason."),
    "guard": Counted(_PREFIX + "guard", "failed", "What the guard against values that are not finite has failed."),
}
GAUGES = (
    Held(_PREFIX + "states", ("states", "held"), "kind", "KDA states held, by why they are kept."),
    Held(_PREFIX + "state_bytes", ("states", "bytes"), "kind", "Bytes of KDA states held on one rank."),
    Held(_PREFIX + "state_blocks", ("states", "blocks"), None, "Blocks that KDA states hold."),
    Held(_PREFIX + "state_budget_blocks", ("states", "budget_blocks"), None, "Blocks that KDA states may hold."),
    Held(_PREFIX + "withheld_blocks", ("pool", "withheld_blocks"), None, "Blocks that the guard withholds."),
)
READY = _PREFIX + "ready"


@cache
def _counters() -> dict[str, Any]:
    """The counters by family; made on first use, in the API process."""
    from prometheus_client import Counter

    return {
        family: Counter(metric.name, metric.about, [*_BY_ENGINE, metric.label]) for family, metric in COUNTERS.items()
    }


@cache
def _gauges() -> dict[str, Any]:
    """The gauges by name. Several API servers show the same engines, so the one who looked last is right."""
    from prometheus_client import Gauge

    made = {
        metric.name: Gauge(
            metric.name,
            metric.about,
            [*_BY_ENGINE, *([metric.label] if metric.label else ())],
            multiprocess_mode="mostrecent",
        )
        for metric in GAUGES
    }
    made[READY] = Gauge(
        READY, "1, or 0 while values that are not finite recur.", _BY_ENGINE, multiprocess_mode="mostrecent"
    )
    return made


def record(model: str, engine: int, view: dict[str, Any]) -> None:
    """Enter one engine's view: gauges as they are, counters by what was counted since the view before.

    Args:
        model: the name that the model is served under.
        engine: the engine's data-parallel rank.
        view: of :func:`vllm_kimi_k3.cache.view.view`.
    """
    labels = (model, str(engine))
    for family, counter in _counters().items():
        for label, count in view["since_last_view"][family].items():
            counter.labels(*labels, label).inc(count)
    gauges = _gauges()
    for metric in GAUGES:
        part, name = metric.path
        value = view[part][name]
        for label, number in value.items() if metric.label else ((None, value),):
            gauges[metric.name].labels(*labels, *([label] if metric.label else ())).set(number)
    gauges[READY].labels(*labels).set(view["ready"])
