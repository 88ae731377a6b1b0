"""Events and requests in vLLM's terms: deltas, whole messages, schemas of tools."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from pydantic import BaseModel
from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    FunctionCall,
    ToolCall,
)

from vllm_kimi_k3.chat.arguments import Schema, json_kind, quote
from vllm_kimi_k3.chat.effort import resolve
from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Event, Reasoning
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer

_pieces: WeakKeyDictionary[Any, Pieces] = WeakKeyDictionary()


def pieces_of(tokenizer: Any) -> Pieces:
    """The text table of a K3 tokenizer, made once for each.

    Raises TypeError for any other tokenizer: only K3's knows the bytes of a token and which ids are special.
    """
    if tokenizer not in _pieces:
        if not isinstance(tokenizer, KimiK3Tokenizer):
            raise TypeError(
                f"the kimi_k3 parsers need the kimi_k3 tokenizer, got {type(tokenizer).__name__}; "
                "start the server with --tokenizer-mode kimi_k3"
            )
        _pieces[tokenizer] = Pieces(tokenizer.special, tokenizer.k3.token_bytes)
    return _pieces[tokenizer]


def thinks(chat_template_kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a request thinks, as far as its template arguments say; the prompt's ids know better."""
    arguments = dict(chat_template_kwargs or {})
    try:
        return resolve(arguments.pop("reasoning_effort", None), kwargs=arguments).enabled
    except RequestError:
        # The renderer refuses the request and says why.
        return True


def tool_schemas(tools: Iterable[Any] | None, messages: Iterable[Any] | None = None) -> dict[str, Schema]:
    """`parameters` by tool name, from a request's tools (Chat or Responses) and those declared in its messages."""
    schemas: dict[str, Schema] = {}
    declared = [
        tool for message in messages or () if isinstance(message, Mapping) for tool in message.get("tools") or ()
    ]
    for tool in [*declared, *(tools or ())]:
        if not isinstance(tool, Mapping):
            tool = tool.model_dump()
        function = tool.get("function") if isinstance(tool.get("function"), Mapping) else tool
        if isinstance(function.get("name"), str) and isinstance(function.get("parameters"), Mapping | bool):
            schemas[function["name"]] = function["parameters"]
    return schemas


def delta_message(events: Sequence[Event]) -> DeltaMessage | None:
    """One streaming delta. Fields that have nothing stay unset: they are not sent."""
    values: dict[str, Any] = {"role": None, "content": None, "reasoning": None, "tool_calls": []}
    calls: list[DeltaToolCall] = values["tool_calls"]
    names: set[str] = set()
    for event in events:
        if isinstance(event, Arguments):
            if calls and calls[-1].index == event.call:
                function = calls[-1].function
                function.arguments += event.text
            else:
                calls.append(_arguments(event.call, event.text))
        elif isinstance(event, Reasoning):
            values["reasoning"] = event.text if values["reasoning"] is None else values["reasoning"] + event.text
            names.add("reasoning")
        elif isinstance(event, Content):
            values["content"] = event.text if values["content"] is None else values["content"] + event.text
            names.add("content")
        elif isinstance(event, CallStart):
            calls.append(_start(event))
    if calls:
        names.add("tool_calls")
    return _message(values, names) if names else None


def _builder(model: type[BaseModel]) -> Callable[[dict[str, Any], set[str]], Any]:
    """Makes instances of a pydantic model from the values of all fields, and the names of those that are set.

    Validation would cost several times what it costs to parse a token; pydantic's own `model_construct` still twice.
    """
    new = model.__new__
    put_values = BaseModel.__dict__["__dict__"].__set__
    put_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
    put_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
    put_private = BaseModel.__dict__["__pydantic_private__"].__set__

    def build(values: dict[str, Any], names: set[str]) -> Any:
        made = new(model)
        put_values(made, values)
        put_names(made, names)
        put_extra(made, None)
        put_private(made, None)
        return made

    return build


_function = _builder(DeltaFunctionCall)
_call = _builder(DeltaToolCall)
_message = _builder(DeltaMessage)


def _arguments(index: int, text: str) -> Any:
    function = _function({"name": None, "arguments": text}, {"arguments"})
    return _call({"id": None, "type": None, "index": index, "function": function}, {"index", "function"})


def _start(event: CallStart) -> Any:
    function = _function({"name": event.name, "arguments": ""}, {"name", "arguments"})
    values = {"id": event.id, "type": "function", "index": event.call, "function": function}
    return _call(values, set(values))


def whole_message(events: Sequence[Event]) -> tuple[str | None, str | None, list[FunctionCall]]:
    """Reasoning, content and calls of a complete output; None where there is no text."""
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    starts = [event for event in events if isinstance(event, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    for event in events:
        if isinstance(event, Arguments):
            arguments[event.call - starts[0].call].append(event.text)
    calls = [
        FunctionCall(id=start.id, name=start.name, arguments="".join(parts))
        for start, parts in zip(starts, arguments, strict=True)
    ]
    return reasoning or None, content or None, calls


def as_anthropic_calls(calls: Sequence[ToolCall], cut: bool) -> list[ToolCall]:
    """Calls whose arguments are a JSON object, as a `tool_use` block needs them.

    With `cut` a last call that the token limit left incomplete is left out: it must not run, and `stop_reason` says
    that the answer was cut. Other arguments become an object with the one key `arguments`.
    """
    kept = []
    for position, call in enumerate(calls, 1):
        arguments = call.function.arguments
        kind = json_kind(arguments)
        if kind is None and cut and position == len(calls):
            continue
        if kind != "object":
            call.function.arguments = f'{{"arguments": {arguments if kind else quote(arguments)}}}'
        kept.append(call)
    return kept
