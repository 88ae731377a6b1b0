"""Greedy answers of the training twin to exam questions, without a cache: the whole batch again for each token."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Event, Reasoning
from vllm_kimi_k3.chat.parser import Mode, OutputParser
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.dialogue import thinking
from vllm_kimi_k3.nano.exam import Question, Reply, right


def greedy(model: BatchedK3, prompts: Sequence[list[int]], stop: int, most: int, tokens: int) -> list[list[int]]:
    """The likeliest continuations, up to and with ``stop``.

    Args:
        prompts: token ids; each with ``most`` more must fit into a row, the power of two at or above the longest.
        most: tokens an answer, at most.
        tokens: of a batch, rows times their length: always the same, so that compiled layers serve.
    """
    length = 512
    while length < max(map(len, prompts)) + most:
        length *= 2
    rows = max(1, tokens // length)
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), rows):
        answers += _continue(model, prompts[begin : begin + rows], rows, length, stop, most)
    return answers


def _continue(
    model: BatchedK3, prompts: Sequence[list[int]], rows: int, length: int, stop: int, most: int
) -> list[list[int]]:
    device = next(model.parameters()).device
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    sizes = [len(prompt) for prompt in prompts] + [1] * (rows - len(prompts))
    end = torch.tensor(sizes, device=device)
    every = torch.arange(rows, device=device)
    done = torch.tensor([False] * len(prompts) + [True] * (rows - len(prompts)), device=device)
    for _ in range(most):
        # With a graph, as in training, so that the layers compiled for it serve here too.
        hidden = model(ids).hidden.detach()[every, end - 1]
        token: Tensor = model.logits(hidden).argmax(-1)
        ids[every, end] = torch.where(done, ids[every, end], token)
        end = end + ~done
        done = done | (token == stop)
        if bool(done.all()):
            break
    return [ids[row, len(prompt) : int(end[row])].tolist() for row, prompt in enumerate(prompts)]


def read_reply(tokenizer: K3Tokenizer, ids: Sequence[int], enabled: bool) -> Reply:
    """Parse generated ids as the server does."""
    parser = OutputParser(Pieces(tokenizer.special, tokenizer.token_bytes), Mode.THINK if enabled else Mode.RESPONSE)
    events: list[Event] = [*parser.feed(ids), *parser.finish()]
    reply = Reply(finished=bool(ids) and ids[-1] == tokenizer.special.end_of_msg)
    names: list[str] = []
    texts: list[str] = []
    for event in events:
        if isinstance(event, Content):
            reply.content += event.text
        elif isinstance(event, Reasoning):
            reply.reasoning += event.text
        elif isinstance(event, CallStart):
            names.append(event.name)
            texts.append("")
        elif isinstance(event, Arguments):
            texts[event.call] += event.text
    try:
        reply.calls = [(name, json.loads(text or "{}")) for name, text in zip(names, texts, strict=True)]
    except json.JSONDecodeError:
        reply.finished = False
    return reply


def mark(
    model: BatchedK3, tokenizer: K3Tokenizer, asked: Sequence[Question], tokens: int, most: int = 160
) -> list[tuple[Question, Reply, bool]]:
    """Answer questions greedily and mark the replies; see :func:`greedy` for ``tokens`` and ``most``."""
    prompts = [render(tokenizer, question.dialogue.request(generation=True)) for question in asked]
    answers = greedy(model, prompts, tokenizer.special.end_of_msg, most, tokens)
    marked = []
    for question, ids in zip(asked, answers, strict=True):
        reply = read_reply(tokenizer, ids, thinking(question.dialogue.style).enabled)
        marked.append((question, reply, right(question, reply)))
    return marked
