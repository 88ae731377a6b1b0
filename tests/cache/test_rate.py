"""The benchmark of hit rates, on a few requests."""

from benchmarks.prefix_cache import measure, table
from benchmarks.traces import chats
from vllm_kimi_k3.cache.policy import Marks


def test_a_tight_pool_finds_no_less_than_vllms_and_no_more_than_there_is() -> None:
    result = measure(["chats"], [80], 24)
    trace = result["curves"]["chats"]
    (point,) = trace["points"]
    assert 0 < point["vllm"] <= point["ours"] <= trace["unlimited"] < 1
    assert f"{point['ours']:.3f}" in table(result)


def test_a_trace_is_the_same_every_time() -> None:
    marks = Marks.of_vocabulary(1280)
    assert chats(5, marks) == chats(5, marks)
