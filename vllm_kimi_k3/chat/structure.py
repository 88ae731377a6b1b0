"""Grammars of K3's output as xgrammar structural tags, over token ids: markers are ids, all else is ordinary text.

A grammar covers the whole output, thinking included, so nothing depends on finding the end of the thinking first: it
holds when the model skips think, closes it late, or leaves it for the tools channel without closing it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_kimi_k3.chat.arguments import resolve, schema_types
from vllm_kimi_k3.chat.schemas import enforceable, part
from vllm_kimi_k3.chat.tokens import SpecialTokens

Format = dict[str, Any]

# Models may fill an answer with blanks for ever where JSON allows any number of them.
_MAX_BLANKS = 64
# Longer bounds make a grammar too large to compile in a request's time.
_MAX_COUNTED = 4096
_MAX_ENUM = 256
_MAX_REFERENCES = 32
_ATTRIBUTE_TYPES = {"integer": "number"}
_ALL_TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})


@dataclass(frozen=True)
class Tool:
    """A tool that may be called. Only of a strict one the arguments are constrained."""

    name: str
    parameters: Any
    strict: bool


def sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def optional(content: Format) -> Format:
    return {"type": "optional", "content": content}


def either(elements: Sequence[Format]) -> Format:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def constant(text: str) -> Format:
    return {"type": "const_string", "value": text}


def regular(pattern: str) -> Format:
    return {"type": "regex", "pattern": pattern}


def json_value(schema: Any) -> Format:
    """JSON that satisfies a schema, or what of it can be enforced."""
    return {
        "type": "json_schema",
        "json_schema": enforceable(schema, {}),
        "max_whitespace_cnt": _MAX_BLANKS,
    }


def escape(value: str) -> str:
    """An attribute value as it is written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


class Grammar:
    """Builds structural tags for one vocabulary.

    Args:
        specials: the vocabulary's special tokens.
        thinking: whether generation starts inside think; else it starts inside response.
    """

    def __init__(self, specials: SpecialTokens, thinking: bool) -> None:
        self._thinking = thinking
        self._open: Format = {"type": "token", "token": specials.open}
        self._close: Format = {"type": "token", "token": specials.close}
        self._sep: Format = {"type": "token", "token": specials.sep}
        # The reserved special tokens are left out: no model writes them, and the list is repeated for every argument.
        named = [token for token, name in specials.names.items() if not name.startswith("<|reserved_token_")]
        self._text: Format = {"type": "any_tokens", "exclude_tokens": named}

    def answer(self, content: Format | None = None) -> Format:
        """An answer and no calls; `content` constrains its text."""
        return self._message(self._response(content or self._text))

    def calls(self, tools: Sequence[Tool], single: bool = False) -> Format:
        """At least one call; exactly one with `single`. Text before it is allowed."""
        return self._message(self._text_and_calls(tools, single))

    def auto(self, tools: Sequence[Tool], single: bool = False, content: Format | None = None) -> Format:
        """An answer, calls, or both; with `content` an answer of that form or calls."""
        answer = self._response(content or self._text)
        return self._message(either([answer, self._text_and_calls(tools, single)]))

    def _text_and_calls(self, tools: Sequence[Tool], single: bool) -> Format:
        before = self._response(self._text)
        # Without thinking the response is open already and must be closed.
        return sequence(optional(before) if self._thinking else before, self._tools(tools, single))

    def _message(self, body: Format) -> Format:
        body = sequence(body, optional(self._end("message")))
        if not self._thinking:
            return body
        return sequence(self._text, optional(self._end("think")), body)

    def _begin(self, name: str) -> Format:
        return sequence(self._open, constant(name), self._sep)

    def _end(self, name: str) -> Format:
        return sequence(self._close, constant(name), self._sep)

    def _response(self, content: Format) -> Format:
        inside = sequence(content, self._end("response"))
        return sequence(self._begin("response"), inside) if self._thinking else inside

    def _tools(self, tools: Sequence[Tool], single: bool) -> Format:
        call = either([self._call(tool) for tool in tools])
        calls = call if single else {"type": "plus", "content": call}
        return sequence(self._begin("tools"), calls, self._end("tools"))

    def _call(self, tool: Tool) -> Format:
        arguments = self._strict_arguments(tool.parameters) if tool.strict else self._any_arguments()
        return sequence(
            self._open,
            constant(f'call tool="{escape(tool.name)}" index="'),
            regular("[0-9]{1,6}"),
            constant('"'),
            self._sep,
            arguments,
            self._end("call"),
        )

    def _any_arguments(self) -> Format:
        key = regular(r'[^"\x00-\x1f]{1,256}')
        return {"type": "star", "content": either(self._values(key, _ALL_TYPES, lambda _: {}, None))}

    def _strict_arguments(self, parameters: Any) -> Format:
        """Arguments in the order in which the prompt shows the properties: sorted by key."""
        if not isinstance(parameters, Mapping):
            return self._any_arguments()
        properties = parameters.get("properties")
        required = parameters.get("required")
        if not isinstance(properties, Mapping) or not properties:
            return self._any_arguments()
        needed = set(required) if isinstance(required, list) else set()
        elements = [
            self._argument(key, parameters) if key in needed else optional(self._argument(key, parameters))
            for key in sorted(properties)
        ]
        extra = parameters.get("additionalProperties")
        if extra is not None and extra is not False:
            elements.append(self._any_arguments())
        return sequence(*elements)

    def _argument(self, key: str, parameters: Mapping[str, Any]) -> Format:
        schema = parameters["properties"][key]
        raw = schema
        for _ in range(_MAX_REFERENCES):
            if not (isinstance(raw, Mapping) and isinstance(raw.get("$ref"), str)):
                break
            raw = resolve(raw["$ref"], parameters)
        allowed = schema_types(schema, parameters) or _ALL_TYPES
        whole = part(parameters, schema)

        def typed(kind: str) -> Any:
            # A union is narrowed where one keyword says what it is made of; elsewhere the attribute may differ.
            plain = isinstance(schema, Mapping) and isinstance(schema.get("type"), list) and whole is schema
            return {**schema, "type": kind} if plain else whole

        names = {kind for kind in allowed if kind != "integer" or "number" not in allowed}
        return either(self._values(constant(escape(key)), names, typed, raw))

    def _values(self, key: Format, kinds: Any, schema_of: Any, schema: Any) -> list[Format]:
        """One `argument` element for each type that the value may have."""
        elements = []
        for kind in sorted(kinds):
            value = self._string(schema) if kind == "string" else json_value(_only(schema_of(kind), kind))
            opening = (constant('argument key="'), key, constant(f'" type="{_ATTRIBUTE_TYPES.get(kind, kind)}"'))
            elements.append(sequence(self._open, *opening, self._sep, value, self._end("argument")))
        return elements

    def _string(self, schema: Any) -> Format:
        """A raw string: enumerated, matched, counted, or free."""
        if not isinstance(schema, Mapping):
            return self._text
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            texts = [value for value in values if isinstance(value, str)]
            if 0 < len(texts) <= _MAX_ENUM:
                return either([constant(text) for text in texts])
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and _is_regular(pattern):
            return regular(pattern)
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        if isinstance(low, int) and isinstance(high, int) and 0 <= low <= high <= _MAX_COUNTED:
            return regular(rf"[\s\S]{{{low},{high}}}")
        return self._text


def grammar_vocabulary(specials: SpecialTokens, token_bytes: Callable[[int], bytes], size: int) -> list[bytes]:
    """Bytes of each of `size` token ids as a grammar may see them.

    A special token gets bytes that no text has (UTF-8 never contains 0xFF): a grammar can name it by id, but no
    string or free text takes it in because of its spelling.
    """
    return [
        token_bytes(token) if token < specials.ranks else b"\xff" + str(token - specials.ranks).encode()
        for token in range(size)
    ]


def _only(schema: Any, kind: str) -> Any:
    """`schema`, or the bare type where the schema does not say its type."""
    if isinstance(schema, Mapping) and not schema:
        return {"type": kind}
    return schema


def _is_regular(pattern: str) -> bool:
    """Whether a pattern is anchored at both ends and xgrammar can match it exactly."""
    import xgrammar

    if not re.fullmatch(r"\^.*\$", pattern, re.DOTALL) or "(?" in pattern or "\\b" in pattern:
        return False
    try:
        xgrammar.Grammar.from_regex(pattern)
    except (RuntimeError, ValueError):
        return False
    return True
