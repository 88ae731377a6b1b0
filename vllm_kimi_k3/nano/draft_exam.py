"""How many of the draft's guesses the miniature accepts while it answers the exam."""

from collections.abc import Sequence

import torch

from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.dspark.reference import MlaDraft
from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.decode import greedy
from vllm_kimi_k3.nano.draft import BLOCK
from vllm_kimi_k3.nano.exam import TARGETS, questions


def examine(target: BatchedK3, draft: MlaDraft, tokenizer: K3Tokenizer, count: int, tokens: int) -> str:
    """A line a row of the exam: accepted guesses a step, of ``count`` questions; ``tokens`` as in ``greedy``."""
    lines, every = [], list[int]()
    stop = tokenizer.special.end_of_msg
    for row in TARGETS:
        asked = questions(row, count, seed=0)
        prompts = [render(tokenizer, question.dialogue.request(generation=True)) for question in asked]
        with torch.no_grad():
            answers = greedy(target, prompts, stop, 160, tokens)
            steps = [n for found in accepted(target, draft, prompts, answers, tokens) for n in found]
        lines.append(f"{row:28} {sum(steps) / max(1, len(steps)):.2f} of {BLOCK} accepted, {len(steps)} steps")
        every += steps
    return "\n".join([*lines, f"{'all':28} {sum(every) / max(1, len(every)):.2f} of {BLOCK}"])


@torch.no_grad()
def accepted(
    target: BatchedK3, draft: MlaDraft, prompts: Sequence[list[int]], answers: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    """Of each step of each greedy answer, how many guesses stand in it; all blocks of a batch at once.

    What a step accepts depends on the answer alone and not on how it came about, so blocks at all tokens of the answers
    are compared with them, and the steps picked out afterwards; :func:`vllm_kimi_k3.dspark.reference.speculate` is the
    slow form.

    Args:
        answers: what the target greedily generates after ``prompts``.
        tokens: of a batch, rows times their length: always the same, so that compiled layers serve.
    """
    pairs = list(zip(prompts, answers, strict=True))
    length = 512
    while length < max(len(prompt) + len(answer) for prompt, answer in pairs):
        length *= 2
    rows = max(1, tokens // length)
    device = draft.head.device
    found: list[list[int]] = []
    for begin in range(0, len(pairs), rows):
        part = pairs[begin : begin + rows]
        ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
        most = max(len(answer) for _, answer in part)
        positions = torch.zeros(rows, most, dtype=torch.int64, device=device)
        for row, (prompt, answer) in enumerate(part):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer, device=device)
            positions[row] = len(prompt) + torch.arange(most, device=device).clamp(max=len(answer) - 1)
        context = draft.context(target(ids, taps=draft.config.target_layer_ids).taps)
        anchors = ids.gather(1, positions)
        guesses, _ = draft.guess(draft.blocks(context, anchors, positions, BLOCK), anchors)
        for (_, answer), guessed in zip(part, guesses.tolist(), strict=False):
            found.append(_steps(answer, guessed))
    return found


def _steps(answer: list[int], guessed: list[list[int]]) -> list[int]:
    """Walk through an answer: the first token is given, each step takes the right guesses and one token more."""
    steps, at = [], 0
    while at < len(answer) - 1:
        right = 0
        for guess, token in zip(guessed[at], answer[at + 1 :], strict=False):
            if guess != token:
                break
            right += 1
        steps.append(right)
        at += right + 1
    return steps
