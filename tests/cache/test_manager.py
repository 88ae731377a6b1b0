"""The benchmark of the manager's time, on a few requests and steps."""

from collections.abc import Callable
from typing import Any

from benchmarks.manager import Load, measure, table
from benchmarks.prefix_cache import simulation


def test_both_sides_are_timed_and_the_table_shows_them() -> None:
    result = measure(4, 6)
    for sides in result["cases"].values():
        assert all(figure > 0 for side in sides.values() for figure in side.values())
    decode = result["cases"]["decode"]
    assert f"| decode, median | {decode['ours']['median']:,.0f} | {decode['vllm']['median']:,.0f} |" in table(result)


def test_the_load_keeps_its_requests_running(config_of: Callable[..., Any]) -> None:
    load = Load(simulation(config_of(max_num_seqs=6), 300, ours=True), 6, 100, mixed=True)
    for step in range(60):
        load.step(arrival=step % 4 == 0)
        assert 5 <= len(load.side.scheduler.running) <= 6
    assert sum(request.is_finished() for request in load.side.requests.values()) >= 5
    assert len(load.side.spent) == 60
