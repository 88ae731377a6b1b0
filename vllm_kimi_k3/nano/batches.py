"""Batches of generated dialogues, made ahead by worker processes; batch n of a seed is always the same."""

import random
import tempfile
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.nano.dialogue import Encoder, converse
from vllm_kimi_k3.nano.vocabulary import write_tokenizer

#: from this share of the training on: length of a sequence -> share of the tokens
CURRICULUM: tuple[tuple[float, dict[int, float]], ...] = (
    (0.0, {512: 1.0}),
    (0.12, {512: 0.5, 1024: 0.5}),
    (0.3, {512: 0.25, 1024: 0.35, 2048: 0.4}),
    (0.5, {512: 0.2, 1024: 0.25, 2048: 0.3, 4096: 0.25}),
)


class Batch(NamedTuple):
    """``ids`` uint16 [B, T], padded with 0; ``mask`` uint8 [B, T], 1 for tokens to learn; ``lengths`` int64 [B]."""

    ids: NDArray[np.uint16]
    mask: NDArray[np.uint8]
    lengths: NDArray[np.int64]


def load_tokenizer() -> K3Tokenizer:
    """The miniature's tokenizer, from the package."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return K3Tokenizer.from_directory(Path(folder))


def length_at(progress: float, rng: random.Random) -> int:
    """Draw a sequence length for a share of the training done, 0 … 1."""
    shares = next(shares for begin, shares in reversed(CURRICULUM) if progress >= begin)
    return rng.choices(list(shares), list(shares.values()))[0]


def make_batch(encoder: Encoder, seed: int, rows: int, length: int) -> Batch:
    """Dialogues cut to ``length`` tokens."""
    ids = np.zeros((rows, length), np.uint16)
    mask = np.zeros((rows, length), np.uint8)
    lengths = np.zeros(rows, np.int64)
    rng = random.Random(seed)
    for row in range(rows):
        found, learned = encoder.encode(converse(rng, length))
        size = min(length, len(found))
        ids[row, :size], mask[row, :size], lengths[row] = found[:size], learned[:size], size
    return Batch(ids, mask, lengths)


_encoder: Encoder | None = None


def _work(seed: int, rows: int, length: int) -> Batch:
    global _encoder
    if _encoder is None:
        _encoder = Encoder(load_tokenizer())
    return make_batch(_encoder, seed, rows, length)


def stream(seed: int, first: int, steps: int, tokens: int, workers: int) -> Generator[Batch, None, None]:
    """Batches ``first`` to ``steps`` of a training, each of ``tokens`` tokens, in order.

    Args:
        seed: of the data.
        workers: processes.
    """

    def asked(step: int) -> tuple[int, int, int]:
        length = min(length_at(step / steps, random.Random(f"{seed} {step}")), tokens)
        return seed * 1_000_003 + step, tokens // length, length

    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        pending: deque[Future[Batch]] = deque()
        following = first
        try:
            for _ in range(first, steps):
                while following < steps and len(pending) < 4 * workers:
                    pending.append(pool.submit(_work, *asked(following)))
                    following += 1
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
