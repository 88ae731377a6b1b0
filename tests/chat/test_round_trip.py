"""Renderer and parser are each other's inverse."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chat.test_render import SPELLINGS
from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Reasoning
from vllm_kimi_k3.chat.parser import OutputParser
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.request import ChatRequest
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer

USER = {"role": "user", "content": "hi"}

# Lone surrogates have no bytes; everything else must survive.
texts = st.lists(st.one_of(st.sampled_from(SPELLINGS), st.text(max_size=8)), max_size=4).map("".join)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
calls = st.lists(
    st.tuples(texts.filter(str.strip), st.dictionaries(texts.filter(str.strip), values, max_size=3)), max_size=3
)


@st.composite
def turns(draw: st.DrawFn) -> dict[str, Any]:
    made = [
        {
            "id": f"c{k}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for k, (name, arguments) in enumerate(draw(calls))
    ]
    return {"role": "assistant", "content": draw(texts), "reasoning": draw(texts), "tool_calls": made}


def output_ids(tokenizer: K3Tokenizer, turn: dict[str, Any]) -> list[int]:
    """What the model generates for `turn`: the rendered turn, less the opener that the prompt ends with."""
    prompt = render(tokenizer, ChatRequest([USER]))
    whole = render(tokenizer, ChatRequest([USER, turn], add_generation_prompt=False))
    assert whole[: len(prompt)] == prompt
    return whole[len(prompt) :]


def replayed(tokenizer: K3Tokenizer, ids: list[int]) -> dict[str, Any]:
    """The turn that a client sends back after it received these ids."""
    events = []
    parser = OutputParser(Pieces(tokenizer.special, tokenizer.token_bytes), on_repair=lambda repair: None)
    events += parser.feed(ids)
    events += parser.finish()
    made: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            made.append({"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}})
        elif isinstance(event, Arguments):
            made[event.call]["function"]["arguments"] += event.text
    return {
        "role": "assistant",
        "content": "".join(event.text for event in events if isinstance(event, Content)),
        "reasoning": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "tool_calls": made,
    }


@settings(max_examples=100, deadline=None)
@given(turn=turns())
def test_a_rendered_turn_is_parsed_into_itself(tiny: K3Tokenizer, turn: dict[str, Any]) -> None:
    parsed = replayed(tiny, output_ids(tiny, turn))
    assert (parsed["content"], parsed["reasoning"]) == (turn["content"], turn["reasoning"])
    read = [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in parsed["tool_calls"]]
    assert read == [
        (made["function"]["name"], json.loads(made["function"]["arguments"])) for made in turn["tool_calls"]
    ]


@settings(max_examples=100, deadline=None)
@given(turn=turns())
def test_a_replayed_turn_has_the_ids_that_were_generated(tiny: K3Tokenizer, turn: dict[str, Any]) -> None:
    """So the next request of the conversation finds all of it in the prefix cache."""
    generated = output_ids(tiny, turn)
    assert output_ids(tiny, replayed(tiny, generated)) == generated
