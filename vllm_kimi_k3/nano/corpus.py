"""The text that the miniature's vocabulary is learned from; run as a module to write the vocabulary again."""

import random
from pathlib import Path

from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.tokens import SpecialTokens
from vllm_kimi_k3.nano.dialogue import converse
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.nano.vocabulary import dump_ranks, train_ranks

_SEED = 20261130
_DIALOGUES = 1500
_TOKENS = 1024


def corpus() -> list[str]:
    """Texts of generated dialogues, cut where control tokens stand."""
    # With the 256 bytes as ranks, ids are bytes and what is not a byte is a control token.
    tokenizer = K3Tokenizer({bytes([b]): b for b in range(256)}, SpecialTokens.from_ranks(256))
    texts = []
    for number in range(_DIALOGUES):
        ids = render(tokenizer, converse(random.Random(_SEED + number), _TOKENS).request())
        texts.append(bytes(token if token < 256 else 10 for token in ids).decode())
    return texts


def main() -> None:
    """Learn the ranks and write them into the package."""
    ranks = train_ranks(corpus(), Shape().ranks)
    (Path(__file__).parent / "assets" / "tiktoken.model").write_text(dump_ranks(ranks))


if __name__ == "__main__":
    main()
