"""Grammars: what they let through, what they stop, and that constrained output satisfies the schema."""

import json
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest
import xgrammar

from tests.chat.shapes import argument, call, tools
from tests.chat.vocabulary import PIECES, SPECIALS, run, spell
from vllm_kimi_k3.chat.parser import Mode
from vllm_kimi_k3.chat.repairs import Repair
from vllm_kimi_k3.chat.schemas import compiles, enforceable
from vllm_kimi_k3.chat.structure import Format, Grammar, Tool, grammar_vocabulary, json_value

SIZE = SPECIALS.vocab_size + 3
INFO = xgrammar.TokenizerInfo(
    grammar_vocabulary(SPECIALS, PIECES.bytes_of, SIZE),
    vocab_type=xgrammar.VocabType.RAW,
    vocab_size=SIZE,
    stop_token_ids=[SPECIALS.end_of_msg],
)
COMPILER = xgrammar.GrammarCompiler(INFO, max_threads=1)

THINKING, DIRECT = Grammar(SPECIALS, thinking=True), Grammar(SPECIALS, thinking=False)
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
LIST = Tool("list_dir", PATH, strict=True)
OTHER = Tool('it"s & more', None, strict=False)
SRC = argument("path", "string", "src")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
END = "<C>message<S><E>"
THOUGHT = "hm<C>think<S>"
HI = "<O>response<S>Hi<C>response<S>"
CALL = tools(call("list_dir", SRC))
TWO = tools(*[call("list_dir", SRC)] * 2)
JSON = '<O>response<S>{"x":1}<C>response<S>'


def matcher(form: Format) -> xgrammar.GrammarMatcher:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(tag))


def accepts(form: Format, output: str) -> bool:
    state = matcher(form)
    return all(state.accept_token(token) for token in spell(output)) and state.is_terminated()


POINTS, STRINGS = json_value(POINT), json_value({"type": "string"})
ODD = tools(call("it&quot;s &amp; more", SRC, argument("n", "number", "1")))
SPELLED = "<O>response<S><|open|>tools<|sep|><C>response<S>"
ACCEPTED = [
    ("an answer", THINKING.answer(POINTS), THOUGHT + JSON + END),
    ("an answer without thinking", DIRECT.answer(POINTS), '{"x": 1}<C>response<S>' + END),
    ("think not closed", THINKING.answer(POINTS), "hm" + JSON + END),
    ("think skipped", THINKING.answer(POINTS), JSON + END),
    ("message left open", THINKING.answer(POINTS), THOUGHT + JSON + "<E>"),
    ("a call", THINKING.calls([LIST]), THOUGHT + CALL + END),
    ("a call from think", THINKING.calls([LIST]), "hm" + CALL + END),
    ("text and calls", THINKING.calls([LIST]), HI + TWO + END),
    ("a call without thinking", DIRECT.calls([LIST]), "<C>response<S>" + CALL + END),
    ("any arguments", THINKING.calls([OTHER]), ODD + END),
    ("auto answers", THINKING.auto([LIST]), THOUGHT + HI + END),
    ("auto calls", THINKING.auto([LIST]), THOUGHT + CALL + END),
    ("auto does both", THINKING.auto([LIST]), HI + CALL + END),
    ("auto of a form", THINKING.auto([LIST], content=POINTS), JSON + END),
    ("calls in place of a form", THINKING.auto([LIST], content=POINTS), "hm" + CALL + END),
    ("text and calls in place of a form", DIRECT.auto([LIST], content=POINTS), "Ok<C>response<S>" + CALL + END),
    ("spelled markers are text", THINKING.answer(), "<|close|>think<|sep|>" + SPELLED + END),
    ("spelled markers in JSON", DIRECT.answer(STRINGS), '"<|close|>"<C>response<S>' + END),
]
REJECTED = [
    ("no call where one is due", THINKING.calls([LIST]), THOUGHT + HI + END),
    ("an unknown tool", THINKING.calls([LIST]), tools(call("rm", SRC)) + END),
    ("a missing argument", THINKING.calls([LIST]), tools(call("list_dir")) + END),
    ("a wrong type", THINKING.calls([LIST]), tools(call("list_dir", argument("path", "number", "1"))) + END),
    ("two calls where one is due", THINKING.calls([LIST], single=True), TWO + END),
    ("calls where none is due", THINKING.answer(), HI + CALL + END),
    ("text where JSON is due", THINKING.answer(POINTS), HI + END),
    ("text where a form or a call is due", THINKING.auto([LIST], content=POINTS), HI + END),
    ("a marker spelled as text", DIRECT.answer(POINTS), '{"x": 1}<|close|>response<|sep|>' + END),
    ("a special token in JSON", DIRECT.answer(STRINGS), '"<S>"<C>response<S>' + END),
    ("a special token in an argument", THINKING.calls([LIST]), CALL.replace("src", "s<S>rc") + END),
]


@pytest.mark.parametrize(("form", "output"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED])
def test_accepted(form: Format, output: str):
    assert accepts(form, output)


@pytest.mark.parametrize(("form", "output"), [case[1:] for case in REJECTED], ids=[case[0] for case in REJECTED])
def test_rejected(form: Format, output: str):
    assert not accepts(form, output)


def sample(form: Format, seed: int) -> list[int]:
    """Tokens drawn from those that the grammar allows, with a bias for what brings the output to an end."""
    random = Random(seed)
    state = matcher(form)
    mask = xgrammar.allocate_token_bitmask(1, SIZE)
    ids: list[int] = []
    while not state.is_terminated():
        state.fill_next_token_bitmask(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")).tolist()
        assert allowed, "a grammar must never leave the model without a token"
        ending = [token for token in allowed if token in SPECIALS or token in map(ord, '"}]')]
        ids.append(random.choice(ending if ending and random.random() < 0.9 else allowed))
        assert state.accept_token(ids[-1])
        assert len(ids) < 20_000
    return ids


PROPERTIES = {
    "name": {"type": "string", "minLength": 1, "maxLength": 5},
    "kind": {"enum": ["a", "b & c"]},
    "count": {"type": "integer", "minimum": 0, "maximum": 99},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "code": {"type": "string", "pattern": "^[a-c]{2}$"},
    "point": {"$ref": "#/$defs/point"},
    "a/b": {"type": "array", "items": {"$ref": "#/properties/count"}, "maxItems": 3},
}
STRICT = {"type": "object", "properties": PROPERTIES, "required": list(PROPERTIES)[:5], "$defs": {"point": POINT}}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("thinking", [True, False])
def test_strict_calls_satisfy_the_schema(seed: int, thinking: bool):
    ids = sample(Grammar(SPECIALS, thinking).calls([Tool("t", STRICT, strict=True)], single=True), seed)
    result = run(ids, start=Mode.THINK if thinking else Mode.RESPONSE, schemas={"t": STRICT})
    assert result.names == ["t"] and result.complete == [True]
    jsonschema.validate(json.loads(result.arguments[0]), STRICT)
    assert set(result.repairs) <= {
        Repair.THINK_CLOSE_INFERRED,
        Repair.BYTES_INVALID,
        Repair.SPECIAL_DROPPED,
        Repair.TYPE_FROM_SCHEMA,
    }


@pytest.mark.parametrize("seed", range(5))
def test_formatted_answers_satisfy_the_schema(seed: int):
    jsonschema.validate(json.loads(run(sample(THINKING.answer(json_value(POINT)), seed)).content), POINT)


def with_property(schema: dict, **more) -> dict:
    return {"type": "object", "properties": {"b": schema}, **more}


NESTED_DEFS = {"$defs": {"q": {"type": "string"}}, "$ref": "#/properties/b/$defs/q"}
DIALECTS = [
    ("anyOf at the top", {"anyOf": [with_property({"type": "string"}), {"type": "object"}]}, True),
    ("$defs below the top", with_property(NESTED_DEFS), True),
    ("definitions elsewhere", with_property({"$ref": "#/components/x"}, components={"x": {"type": "integer"}}), True),
    ("reference to nowhere", with_property({"$ref": "#/$defs/q"}), False),
    ("huge bound", {"type": "string", "minLength": 999_999_999_999}, False),
    ("unknown type", with_property({"type": "text"}), False),
    ("required is no list", {"type": "object", "required": "a"}, False),
    ("properties is a list", {"type": "object", "properties": ["a"]}, False),
]


@pytest.mark.parametrize(("schema", "whole"), [case[1:] for case in DIALECTS], ids=[case[0] for case in DIALECTS])
def test_dialects_are_accepted_and_relaxed_with_a_warning(schema: dict, whole: bool, caplog: pytest.LogCaptureFixture):
    relaxed = enforceable(schema, {})
    assert compiles(relaxed) is None
    assert (relaxed == schema) is whole
    assert any("not enforced" in r.message or "in part" in r.message for r in caplog.records) is not whole
    matcher(THINKING.answer(json_value(schema)))
    matcher(THINKING.calls([Tool("t", schema, strict=True)]))


def test_a_property_named_like_a_keyword_is_kept():
    schema = {"type": "object", "properties": {"type": {"type": "string"}, "required": {"type": "x"}}}
    assert enforceable(schema, {})["properties"] == {"type": {"type": "string"}, "required": {}}


def test_walle_schemas_compile(shared: Path):
    schemas = [
        json.loads(line)
        for file in sorted((shared / "data/walle/validator_cases").glob("*/valid.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert len(schemas) == 212
    for schema in schemas:
        matcher(THINKING.answer(json_value(schema)))
        matcher(THINKING.calls([Tool("t", schema, strict=True)]))
