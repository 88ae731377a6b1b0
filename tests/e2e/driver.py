"""Driving a vLLM engine by token ids."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 1000

#: How far two logprobs of the random fp32 checkpoint may stand apart that differ only by their order of summation.
#: Measured on its prompts of up to 1,900 tokens with AVX2 and with AVX-512: engine to fp64 reference up to 1.6e-4,
#: fp32 to fp64 reference up to 1.5e-4. A state from another boundary moves them by 1e-2 and more.
ROUNDING = 5e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ordinary token ids."""
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


@dataclass
class Answer:
    """What a request got: output ids, their logprobs, the prompt's logprobs from its second token on."""

    ids: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float]
    cached: int


def difference(one: list[float], other: list[float]) -> float:
    """The largest distance between two lists of logprobs of the same length."""
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def assert_same(one: Answer, other: Answer) -> None:
    """Two greedy answers agree: the same tokens and logprobs, up to a tie that rounding alone decides.

    Where two tokens are tied the answers may part, with equal logprobs at that place; what follows is not compared.
    """
    assert len(one.ids) == len(other.ids) > 0
    assert len(one.prompt_logprobs) == len(other.prompt_logprobs)
    pairs = zip(one.ids, other.ids, strict=True)
    compared = next((place + 1 for place, (a, b) in enumerate(pairs) if a != b), len(one.ids))
    scores = [answer.prompt_logprobs + answer.logprobs[:compared] for answer in (one, other)]
    assert difference(*scores) < ROUNDING


class Engine:
    """An in-process ``LLM`` that takes and gives token ids.

    Args:
        checkpoint: the model's directory.
        settings: of ``LLM``.
    """

    def __init__(self, checkpoint: Path, **settings: Any) -> None:
        from vllm import LLM

        defaults: dict[str, Any] = {
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(str(checkpoint), **(defaults | settings))

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @contextmanager
    def chunked(self, tokens: int) -> Iterator[list[int]]:
        """Within it, no step takes more than so many tokens in all; 0 is no limit. Gives the sizes of the steps."""
        scheduler, steps = self.scheduler, []
        before, schedule = scheduler.max_num_scheduled_tokens, scheduler.schedule

        def recorded(*arguments: Any, **options: Any) -> Any:
            output = schedule(*arguments, **options)
            steps.append(output.total_num_scheduled_tokens)
            return output

        scheduler.max_num_scheduled_tokens = tokens or before
        scheduler.schedule = recorded
        try:
            yield steps
        finally:
            scheduler.max_num_scheduled_tokens = before
            del scheduler.schedule

    def parameters(self, new: int, score: bool) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            prompt_logprobs=0 if score else None,
        )

    def run(self, prompts: list[list[int]], new: int = 1, score: bool = False, salt: str | None = None) -> list[Answer]:
        """Greedy answers to prompts that run together.

        Args:
            prompts: token ids.
            new: output tokens of each.
            score: also give the prompts' logprobs; vLLM then reads nothing from the prefix cache.
            salt: keeps the requests' cache entries apart from those of other salts.
        """
        requests = [{"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for ids in prompts]
        outputs = self.llm.generate(requests, self.parameters(new, score), use_tqdm=False)
        return [answer(output) for output in outputs]

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()


def answer(output: Any) -> Answer:
    """From vLLM's output of one request."""
    completion = output.outputs[0]
    prompt_logprobs = []
    if output.prompt_logprobs:
        pairs = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        prompt_logprobs = [position[token].logprob for position, token in pairs]
    return Answer(
        ids=list(completion.token_ids),
        logprobs=[
            position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ],
        prompt_logprobs=prompt_logprobs,
        cached=output.num_cached_tokens,
    )
