"""The trained miniature in vLLM's engine on a GPU, against the reference model on the CPU, both fp32."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.e2e.driver import Engine, answer, difference, prompt
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.reference import KimiK3, load_checkpoint

#: Sums in another order, in nine layers and a softmax over the vocabulary.
TOLERANCE = 2e-3
SETTINGS = {"max_model_len": 1024, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}


@pytest.fixture(scope="module")
def oracle() -> KimiK3:
    return load_checkpoint(target_path(), torch.float32)


@pytest.fixture(scope="module", params=["eager", "graphs"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(target_path(), dtype="float32", enforce_eager=request.param == "eager", **SETTINGS)
    yield engine
    engine.close()


def forced(oracle: KimiK3, ids: list[int]) -> tuple[list[float], list[float]]:
    """Logprobs of a sequence's tokens from the second on, and of the likeliest tokens there."""
    scores = torch.log_softmax(oracle.forward(torch.tensor(ids)), -1)[:-1]
    own = scores.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1)
    return own.tolist(), scores.amax(-1).tolist()


@pytest.mark.parametrize("length", [1, 2, 17, 64, 65, 300, 700])
def test_logprobs_and_greedy_tokens_equal_the_reference(engine: Engine, oracle: KimiK3, length: int) -> None:
    ids = prompt(length)
    got = engine.run([ids], new=12, score=True)[0]
    expected, best = forced(oracle, ids + got.ids)
    far = difference(got.prompt_logprobs + got.logprobs, expected)
    print("greatest difference", far)
    assert far < TOLERANCE
    # Near ties may fall either way.
    assert difference(best[length - 1 :], expected[length - 1 :]) < TOLERANCE


@pytest.mark.parametrize("chunk", [16, 100, 128])
def test_chunked_prefill_equals_whole_prefill(engine: Engine, chunk: int) -> None:
    ids = prompt(700, seed=2)
    whole = engine.run([ids], new=8, score=True)[0]
    with engine.chunked(chunk):
        chunked = engine.run([ids], new=8, score=True)[0]
    far = difference(chunked.prompt_logprobs, whole.prompt_logprobs)
    print("greatest difference", far)
    assert far < TOLERANCE


def test_a_batch_equals_its_requests_alone(engine: Engine, oracle: KimiK3) -> None:
    prompts = [prompt(length, seed=3) for length in (300, 17, 700, 64, 129, 900, 2, 400, 1)]
    llm = engine.llm.llm_engine
    for index, ids in enumerate(prompts):
        # A new request joins every second step, so each step mixes decodes with prefill chunks.
        llm.add_request(str(index), {"prompt_token_ids": ids, "cache_salt": "mixed"}, engine.parameters(20, False))
        llm.step()
        llm.step()
    finished = {}
    while llm.has_unfinished_requests():
        finished |= {int(output.request_id): answer(output) for output in llm.step() if output.finished}
    for index, ids in enumerate(prompts):
        expected, best = forced(oracle, ids + finished[index].ids)
        far = difference(finished[index].logprobs, expected[len(ids) - 1 :])
        print(len(ids), "greatest difference", far)
        assert far < TOLERANCE
        assert difference(best[len(ids) - 1 :], expected[len(ids) - 1 :]) < TOLERANCE


@pytest.mark.parametrize("length", [129, 300, 900])
def test_a_warm_prefix_cache_changes_nothing(engine: Engine, length: int) -> None:
    ids = prompt(length, seed=4)
    cold = engine.run([ids], new=12)[0]
    warm = engine.run([ids], new=12)[0]
    assert cold.cached == 0
    assert warm.cached >= 128
    far = difference(warm.logprobs, cold.logprobs)
    print("cached", warm.cached, "greatest difference", far)
    assert far < TOLERANCE
    longer = ids + warm.ids + prompt(50, seed=5)
    again, apart = (engine.run([longer], new=12, salt=salt)[0] for salt in (None, "x"))
    assert difference(again.logprobs, apart.logprobs) < TOLERANCE


def test_bf16_is_near_the_reference(oracle: KimiK3) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = Engine(target_path(), enforce_eager=False, **SETTINGS)
    ids = prompt(500, seed=6)
    got = engine.run([ids], new=20, score=True)[0]
    engine.close()
    expected, _ = forced(oracle, ids + got.ids)
    pairs = zip(got.prompt_logprobs + got.logprobs, expected, strict=True)
    mean = sum(abs(a - b) for a, b in pairs) / len(expected)
    print("mean difference", mean)
    assert mean < 0.15
