"""The engine's numbers against the reference model: whole prompts, chunks, decoding, batches, the prefix cache."""

import pytest
import torch

from tests.e2e.driver import ROUNDING, Engine, answer, assert_same, difference, prompt
from vllm_kimi_k3.reference import KimiK3


def reference_logprobs(oracle: KimiK3, ids: list[int]) -> list[float]:
    """Logprobs of a sequence's tokens from the second on."""
    logits = oracle.forward(torch.tensor(ids))
    scores = torch.log_softmax(logits, -1)
    return scores[:-1].gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65, 300, 1000])
def test_prompt_logprobs_and_greedy_tokens_equal_the_reference(engine: Engine, oracle: KimiK3, length: int) -> None:
    ids = prompt(length)
    got = engine.run([ids], new=4, score=True)[0]
    expected = reference_logprobs(oracle, ids + got.ids)
    assert difference(got.prompt_logprobs + got.logprobs, expected) < ROUNDING
    state = oracle.new_state()
    logits = oracle.forward(torch.tensor(ids), state)[-1]
    for token, logprob in zip(got.ids, got.logprobs, strict=True):
        assert torch.log_softmax(logits, -1).max().item() == pytest.approx(logprob, abs=ROUNDING)
        logits = oracle.forward(torch.tensor([token]), state)[-1]


@pytest.mark.parametrize("length", [3, 130, 500])
def test_decoding_equals_teacher_forcing(engine: Engine, length: int) -> None:
    ids = prompt(length, seed=1)
    decoded = engine.run([ids], new=40)[0]
    forced = engine.run([ids + decoded.ids], score=True)[0]
    assert difference(forced.prompt_logprobs[length - 1 :], decoded.logprobs) < ROUNDING


@pytest.mark.parametrize("chunk", [16, 17, 63, 64, 100, 128, 256, 512])
def test_chunked_prefill_equals_whole_prefill(engine: Engine, chunk: int) -> None:
    ids = prompt(700, seed=2)
    whole = engine.run([ids], new=8, score=True)[0]
    with engine.chunked(chunk) as steps:
        chunked = engine.run([ids], new=8, score=True)[0]
    assert max(steps) == chunk
    assert len(steps) >= -(-700 // chunk) + 7
    assert_same(chunked, whole)


def test_a_batch_of_mixed_prefill_and_decode_equals_its_requests_alone(engine: Engine) -> None:
    prompts = [prompt(length, seed=3) for length in (300, 17, 700, 64, 129, 900, 2, 400)]
    alone = [engine.run([ids], new=20, salt=f"alone {i}")[0] for i, ids in enumerate(prompts)]
    llm = engine.llm.llm_engine
    for index, ids in enumerate(prompts):
        # A new request joins every second step, so each step mixes decodes with prefill chunks.
        llm.add_request(str(index), {"prompt_token_ids": ids, "cache_salt": "mixed"}, engine.parameters(20, False))
        llm.step()
        llm.step()
    finished = {}
    while llm.has_unfinished_requests():
        finished |= {int(output.request_id): answer(output) for output in llm.step() if output.finished}
    for index, expected in enumerate(alone):
        assert_same(finished[index], expected)


@pytest.mark.parametrize("length", [100, 129, 256, 300, 900])
def test_a_warm_prefix_cache_changes_nothing(engine: Engine, length: int) -> None:
    ids = prompt(length, seed=4)
    cold = engine.run([ids], new=12)[0]
    warm = engine.run([ids], new=12)[0]
    assert cold.cached == 0
    assert warm.cached > 0 or length < 129
    assert_same(warm, cold)
    longer = ids + warm.ids + prompt(50, seed=5)
    assert_same(engine.run([longer], new=12)[0], engine.run([longer], new=12, salt="x")[0])


def test_aborted_requests_leak_no_blocks(engine: Engine) -> None:
    before = engine.free_blocks()
    llm = engine.llm.llm_engine
    for steps in range(6):
        ids = prompt(600, seed=6 + steps)
        llm.add_request(f"abort {steps}", {"prompt_token_ids": ids}, engine.parameters(50, False))
        with engine.chunked(200):
            for _ in range(steps):
                llm.step()
        llm.abort_request([f"abort {steps}"])
        llm.step()
    assert not llm.has_unfinished_requests()
    assert engine.free_blocks() == before
