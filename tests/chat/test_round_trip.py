"""What the renderer writes for an assistant turn, the parser reads back."""

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.bodies import read_body
from tests.chat.shapes import SHAPES, Shape
from tests.chat.test_parser_properties import calls, texts
from tests.chat.vocabulary import RANKS, SPECIALS, Result, run, spell
from vllm_kimi_k3.chat.parser import Mode, OutputParser
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.prompt import resume
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer

TINY = K3Tokenizer(RANKS, SPECIALS)
USER = {"role": "user", "content": "Hi"}


@cache
def published(shared: Path) -> K3Tokenizer:
    return K3Tokenizer.from_directory(shared / "data/tokenizer")


def output_ids(tokenizer: K3Tokenizer, turn: dict[str, Any], thinking: bool) -> tuple[list[int], list[int]]:
    """The prompt that an assistant turn answers, and the turn as the model would write it."""
    options = {"chat_template_kwargs": {"thinking": thinking}}
    prompt = render(tokenizer, read_body({"messages": [USER], **options}))
    whole = render(tokenizer, read_body({"messages": [USER, turn], **options}, {"add_generation_prompt": False}))
    assert whole[: len(prompt)] == prompt
    return prompt, whole[len(prompt) :]


def check(tokenizer: K3Tokenizer, reasoning: str, content: str, made: list, thinking: bool, sizes: list[int]) -> None:
    turn = {
        "role": "assistant",
        "reasoning": reasoning,
        "content": content,
        "tool_calls": [
            {"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(made)
        ],
    }
    prompt, ids = output_ids(tokenizer, turn, thinking)
    parser = OutputParser(Pieces(tokenizer.special, tokenizer.token_bytes), Mode.RESPONSE)
    assert resume(parser, prompt)
    events, at = [], 0
    for size in sizes * (len(ids) // sum(sizes) + 1):
        events += parser.feed(ids[at : at + size])
        at += size
    result = Result(events + parser.finish(), [])
    assert (result.reasoning, result.content) == (reasoning if thinking else "", content)
    assert [(name, json.loads(arguments)) for name, arguments in result.calls] == made
    assert all(result.complete) and not result.cut


turns = (texts, texts, st.lists(calls, max_size=2), st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=5))


@settings(max_examples=60, deadline=None)
@given(*turns)
def test_rendered_turns_are_read_back(reasoning, content, made, thinking, sizes):
    check(TINY, reasoning, content, made, thinking, sizes)


def test_rendered_turns_are_read_back_with_the_published_vocabulary(shared: Path):
    tokenizer = published(shared)

    @settings(max_examples=40, deadline=None)
    @given(*turns)
    def holds(reasoning, content, made, thinking, sizes):
        check(tokenizer, reasoning, content, made, thinking, sizes)

    holds()


@pytest.mark.parametrize("arguments", ['{"a": 1e2,  "b": "x"}', "[1, 2]", '"text"', "{broken", ""])
def test_arguments_given_as_a_string(arguments: str):
    call = {"id": "c", "type": "function", "function": {"name": "t", "arguments": arguments}}
    _, ids = output_ids(TINY, {"role": "assistant", "content": "", "tool_calls": [call]}, thinking=True)
    read = run(ids).arguments[0]
    assert read == {'{"a": 1e2,  "b": "x"}': '{"a": 1e2, "b": "x"}', "": "{}"}.get(arguments, arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=[shape.name for shape in SHAPES])
def test_shapes_with_the_published_vocabulary(shared: Path, shape: Shape):
    tokenizer = published(shared)
    ids: list[int] = []
    short = {SPECIALS.open: tokenizer.special.open, SPECIALS.close: tokenizer.special.close}
    short |= {SPECIALS.sep: tokenizer.special.sep, SPECIALS.end_of_msg: tokenizer.special.end_of_msg}
    text = b""
    for token in [*spell(shape.output), SPECIALS.pad]:
        if token not in SPECIALS:
            text += TINY.token_bytes(token)
            continue
        ids += tokenizer.encode(text.decode())
        text = b""
        ids += [short[token]] if token in short else []
    pieces = Pieces(tokenizer.special, tokenizer.token_bytes)
    random = Random(shape.name)
    for size in (1, 2, 5, random.randint(6, 99)):
        parser = OutputParser(pieces, shape.start)
        events = [event for at in range(0, len(ids), size) for event in parser.feed(ids[at : at + size])]
        result = Result(events + parser.finish(), [])
        assert (result.reasoning, result.content, result.calls) == (shape.reasoning, shape.content, shape.calls)
