"""The prefix cache through the real engine: what is found, warm equals cold, faults end in one failed request."""

import random
from typing import Any

import pytest
import torch

from tests.e2e.driver import ROUNDING, Engine, assert_same, prompt
from vllm_kimi_k3.cache.guard import guard_of
from vllm_kimi_k3.cache.policy import Marks
from vllm_kimi_k3.cache.schedule import state_managers
from vllm_kimi_k3.reference import KimiK3

UNIT = 128


def caches(engine: Engine) -> list[Any]:
    """The worker's cache tensors, of which the first axis counts blocks."""
    runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    return list(runner.kv_caches)


def spoil(engine: Engine, block: int) -> None:
    """Fill a block with NaN in all layers."""
    for cache in caches(engine):
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            tensor[block] = float("nan") if tensor.is_floating_point() else -1


def message(engine: Engine, role: int, length: int, seed: int) -> list[int]:
    """A message of so many tokens as the chat format spells it."""
    marks = Marks.of_vocabulary(engine.scheduler.vllm_config.model_config.get_vocab_size())
    return [marks.open, 1, 2, 3, role, *prompt(length - 6, seed), marks.end_of_msg]


@pytest.mark.parametrize("size", [150, 256, 300, 777, 1024, 1500, 1900])
def test_a_second_user_of_a_system_prompt_hits_all_of_it(engine: Engine, size: int) -> None:
    system = message(engine, 7, size, seed=30)
    users = [system + message(engine, 8, 90, seed=31 + user) for user in range(3)]
    assert [engine.run([ids])[0].cached for ids in users] == [0, size // UNIT * UNIT, size // UNIT * UNIT]


def test_every_turn_of_a_growing_conversation_hits_the_one_before(engine: Engine) -> None:
    ids, before = prompt(300, seed=35), 1
    for turn, (new, more) in enumerate([(20, 150), (60, 10), (3, 400), (130, 128), (40, 300)]):
        got = engine.run([ids], new=new)[0]
        assert got.cached == (before - 1) // UNIT * UNIT, turn
        before = len(ids) + len(got.ids)
        ids = ids + got.ids + prompt(more, seed=36 + turn)


@pytest.mark.parametrize("length", [1000, 1024, 1500])
def test_a_fork_in_raw_text_hits_half_and_then_all(engine: Engine, length: int) -> None:
    base = prompt(1900, seed=length)[:length]
    first, second, third = (engine.run([base + prompt(100, seed=40 + i)])[0].cached for i in range(3))
    assert first == 0
    assert length / 2 <= second <= length
    assert third == length // UNIT * UNIT


@pytest.mark.parametrize("length", [100, 128, 129, 257, 640, 1100, 1900])
def test_an_exact_repeat_hits_all_but_the_last_unit(engine: Engine, length: int) -> None:
    ids = prompt(length, seed=21)
    assert [engine.run([ids])[0].cached for _ in range(2)] == [0, (length - 1) // UNIT * UNIT]


def test_an_aborted_prefill_leaves_what_was_processed_and_nothing_wrong(engine: Engine, oracle: KimiK3) -> None:
    ids, llm = prompt(1000, seed=45), engine.llm.llm_engine
    with engine.chunked(256):
        llm.add_request("aborted", {"prompt_token_ids": ids}, engine.parameters(4, False))
        llm.step()
        llm.step()
        llm.abort_request(["aborted"])
        llm.step()
    got = engine.run([ids])[0]
    assert got.cached in (256, 512)
    assert got.logprobs[0] == pytest.approx(best(oracle, ids)[-1].item(), abs=ROUNDING)


def best(oracle: KimiK3, ids: list[int]) -> torch.Tensor:
    """The largest logprob after each token, from the reference."""
    return torch.log_softmax(oracle.forward(torch.tensor(ids)), -1).max(-1).values


@pytest.mark.slow
def test_warm_equals_the_reference_at_every_length(engine: Engine, oracle: KimiK3) -> None:
    ids = prompt(700, seed=23)
    scores = torch.log_softmax(oracle.forward(torch.tensor(ids)), -1)
    engine.run([ids])
    for start in range(1, 701, 8):
        lengths = list(range(start, min(start + 8, 701)))
        for length, got in zip(lengths, engine.run([ids[:length] for length in lengths]), strict=True):
            expected = pytest.approx(scores[length - 1].max().item(), abs=ROUNDING)
            assert got.cached == (length - 1) // UNIT * UNIT
            assert got.logprobs[0] == expected, length
            assert scores[length - 1, got.ids[0]] == expected, length


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, 200], ids=["whole", "chunked"])
def test_random_forks_and_turns_equal_cold_ones(engine: Engine, chunk: int) -> None:
    generator = random.Random(chunk)
    stem, histories = prompt(1700, seed=24 + chunk), []
    for round_ in range(4):
        batch = []
        for _ in range(4):
            before = generator.choice(histories) if histories and generator.random() < 0.5 else stem
            cut = generator.randrange(1, min(len(before), 1700))
            batch.append(before[:cut] + prompt(generator.randrange(1, 200), seed=generator.randrange(1000)))
        with engine.chunked(chunk) as steps:
            warm = engine.run(batch, new=12)
        assert not chunk or max(steps) == chunk
        for index, (ids, got) in enumerate(zip(batch, warm, strict=True)):
            cold = engine.run([ids], new=12, salt=f"cold {chunk} {round_} {index}")[0]
            assert_same(got, cold)
            histories.append(ids + got.ids)


def test_recycled_pages_do_not_matter(engine: Engine) -> None:
    ids = prompt(500, seed=25)
    expected = engine.run([ids], new=8, salt="before")[0]
    pool = engine.scheduler.kv_cache_manager.block_pool
    for block in pool.free_block_queue.get_all_free_blocks()[:60]:
        spoil(engine, block.block_id)
    got = engine.run([ids], new=8, salt="after")[0]
    assert_same(got, expected)


@pytest.mark.parametrize("leg", ["state", "rows"])
def test_nan_in_the_cache_fails_one_request_and_is_gone(engine: Engine, leg: str) -> None:
    ids = prompt(600, seed=26 + len(leg))
    expected = engine.run([ids], new=8)[0]
    managers = state_managers(engine.scheduler)
    book = managers[0].book
    pool = engine.scheduler.kv_cache_manager.block_pool
    if leg == "state":
        deepest = max((state for state in book.states.values() if state.boundary == 512), key=lambda s: s.boundary)
        bad = {state.legs[managers[0].kv_cache_group_id].block_id for state in book.states.values()}
        assert deepest.legs
    else:
        bad = {block.block_id for block in pool.blocks if block.block_hash is not None}
    for block in bad:
        spoil(engine, block)
    before = book.counts["guard", "requests"]
    output = engine.llm.generate([{"prompt_token_ids": ids}], engine.parameters(8, False), use_tqdm=False)[0]
    assert output.outputs[0].finish_reason == "error"
    assert book.counts["guard", "requests"] == before + 1
    guard = guard_of(engine.scheduler)
    assert guard is not None
    # Everything cached before is bad in this test; a real fault has one page, and drops what hangs on it.
    engine.llm.reset_prefix_cache()
    pool.free_blocks(guard.withheld)
    guard.withheld.clear()
    guard.failures.clear()
    engine.llm.reset_prefix_cache()
    got = engine.run([ids], new=8)[0]
    assert_same(got, expected)
