"""The parser in vLLM's terms: unified parser, reasoning parser and tool parser, all named `kimi_k3`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaMessage,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.parser.abstract_parser import Parser
from vllm.reasoning.abs_reasoning_parsers import ReasoningParser
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

from vllm_kimi_k3.chat import scope
from vllm_kimi_k3.chat.arguments import Schema
from vllm_kimi_k3.chat.events import Arguments, CallStart, Content, Event, Reasoning
from vllm_kimi_k3.chat.parser import Mode, OutputParser
from vllm_kimi_k3.chat.prompt import content_start, reasoning_ended, reasoning_ends_in, resume
from vllm_kimi_k3.chat.repairs import Repair, ignore, record
from vllm_kimi_k3.chat.stops import StopGate
from vllm_kimi_k3.chat.vllm_memory import Turn
from vllm_kimi_k3.chat.vllm_messages import delta_message, pieces_of, thinks, tool_schemas, whole_message
from vllm_kimi_k3.chat.vllm_structure import constrain
from vllm_kimi_k3.settings import settings


class KimiK3Parser(Parser):
    """Splits K3's output for Chat Completions, Responses and, through Chat, Anthropic Messages."""

    always_adjust_request = True

    def __init__(
        self, tokenizer: Any, tools: Any = None, *args: Any, chat_template_kwargs: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(tokenizer, tools, *args, chat_template_kwargs=chat_template_kwargs, **kwargs)
        self.pieces = pieces_of(tokenizer)
        self._tools = tools
        self._start = Mode.THINK if thinks(chat_template_kwargs) else Mode.RESPONSE
        self._prompt_ids: Sequence[int] | None = None
        self._machine: OutputParser | None = None
        self._gate: StopGate | None = None
        self._from_ids: bool | None = None
        self._fed = 0
        self._scope = scope.current.get()
        self._turn = Turn()
        self._hides_reasoning = self._drops_calls = self._plain = False

    def adjust_request(self, request: Any) -> Any:
        """Keep markers in the text, and constrain the output where the request asks for it."""
        request.skip_special_tokens = False
        if hasattr(request, "spaces_between_special_tokens"):
            request.spaces_between_special_tokens = False
        level = self.tool_strict_level or ToolStrictLevel.AUTO
        constrain(
            request,
            self.pieces.specials,
            thinking=self._start is Mode.THINK,
            calls=self._tool_parser is not None,
            constrain_auto=level >= ToolStrictLevel.FUNCTION,
            all_strict=level >= ToolStrictLevel.PARAMETER,
        )
        return request

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """The prompt's end says whether the output starts in think, in response or in the middle of either."""
        self._prompt_ids = prompt_token_ids

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether generation after these ids is outside think."""
        return reasoning_ended(self.pieces, input_ids, self._start)

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """Reasoning, content and calls of a whole output, from its ids where they are given."""
        self._begin(request)
        events = self._feed(model_output, model_output_token_ids, finished=True)
        reasoning, content, calls = whole_message(events)
        return reasoning, content, calls or None

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: Sequence[int],
        request: Any,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The next delta, None if it has nothing to show yet."""
        machine = self._machine
        if machine is None:
            if prompt_token_ids is not None:
                self._prompt_ids = prompt_token_ids
            self._begin(request)
        elif self._plain and self._from_ids and not finished:
            # Nearly every token of a stream comes this way.
            self._fed += len(delta_token_ids)
            events = machine.feed(delta_token_ids)
            if self._scope is not None:
                self._turn.extend(events)
            return delta_message(events) if events else None
        return delta_message(self._feed(delta_text, delta_token_ids, finished))

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens of the think channel, markers not counted. Costs nothing for the ids that were just parsed."""
        if self._machine is not None and self._from_ids and len(token_ids) == self._fed:
            return self._machine.reasoning_tokens
        machine = self._new_machine({}, ignore)
        machine.feed(token_ids)
        return machine.reasoning_tokens

    def _begin(self, request: Any) -> None:
        self._machine = self._new_machine(tool_schemas(self._tools, getattr(request, "messages", None)), record)
        self._fed = 0
        self._from_ids = None
        self._turn = Turn()
        self._gate = StopGate(self.pieces) if getattr(request, "stop", None) else None
        self._hides_reasoning = not getattr(request, "include_reasoning", True)
        self._drops_calls = self._tool_parser is None or getattr(request, "tool_choice", None) == "none"
        self._plain = not (self._gate or self._hides_reasoning or self._drops_calls)

    def _new_machine(self, schemas: Mapping[str, Schema], on_repair: Any) -> OutputParser:
        never_empty = settings().answer_from_reasoning
        machine = OutputParser(self.pieces, self._start, schemas, on_repair=on_repair, never_empty=never_empty)
        if self._prompt_ids is not None:
            resume(machine, self._prompt_ids)
        return machine

    def _feed(self, text: str, ids: Sequence[int], finished: bool) -> list[Event]:
        machine = self._machine
        assert machine is not None
        if self._from_ids is None and (text or ids):
            self._from_ids = bool(ids)
        self._fed += len(ids)
        if not self._from_ids:
            events = machine.feed_text(text) if text else []
        elif self._gate is None:
            events = machine.feed(ids)
        else:
            events = self._gate.feed(machine, ids, text, finished)
        if finished:
            events += machine.finish()
        if self._drops_calls:
            events = _without_calls(events)
        if self._scope is not None:
            self._turn.extend(events)
            if finished:
                self._turn.remember(self._scope, machine.reasoning)
        if self._hides_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        return events


def _without_calls(events: list[Event]) -> list[Event]:
    for event in events:
        if isinstance(event, CallStart):
            record(Repair.CALL_NOT_WANTED)
    return [event for event in events if not isinstance(event, CallStart | Arguments)]


class KimiK3ReasoningParser(ReasoningParser):
    """Reasoning alone: the engine asks it where thinking ends; :class:`KimiK3Parser` does the rest."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._pieces = pieces_of(tokenizer)
        self._start = Mode.THINK if thinks(kwargs.get("chat_template_kwargs")) else Mode.RESPONSE
        self._machine = OutputParser(self._pieces, self._start)

    @property
    def reasoning_start_str(self) -> str:
        return "<|open|>think<|sep|>"

    @property
    def reasoning_end_str(self) -> str:
        return "<|close|>think<|sep|>"

    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = False
        return request

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return reasoning_ended(self._pieces, input_ids, self._start)

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Iterable[int]) -> bool:
        """Whether thinking ends in `delta_ids`, the last of `input_ids`; looks at them and one marker before them."""
        return self._start is not Mode.THINK or reasoning_ends_in(self._pieces, input_ids, len(list(delta_ids)))

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return input_ids[content_start(self._pieces, input_ids, self._start) :]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        machine = OutputParser(self._pieces, self._start, on_repair=ignore)
        machine.feed(token_ids)
        return machine.reasoning_tokens

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """Reasoning and content of a text; with tools the whole text, for the tool parser to read."""
        machine = OutputParser(self._pieces, self._start)
        reasoning, content, _ = whole_message(machine.feed_text(model_output) + machine.finish())
        with_tools = getattr(request, "tools", None) and getattr(request, "tool_choice", None) != "none"
        return reasoning, model_output if with_tools else content

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        events = self._machine.feed(delta_token_ids) if delta_token_ids else self._machine.feed_text(delta_text)
        return delta_message([event for event in events if isinstance(event, Reasoning | Content)])


class KimiK3ToolParser(ToolParser):
    """Tool calls alone, for the text or the ids that follow the reasoning or contain it."""

    supports_required_and_named = False
    structural_tag_model = "kimi_k3"

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._pieces = pieces_of(tokenizer)
        self._schemas = tool_schemas(tools)
        self._machine = OutputParser(self._pieces, Mode.BETWEEN, self._schemas)

    def adjust_request(self, request: Any) -> Any:
        request.skip_special_tokens = False
        if hasattr(request, "spaces_between_special_tokens"):
            request.spaces_between_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        machine = OutputParser(self._pieces, Mode.THINK, self._schemas)
        _, content, calls = whole_message(machine.feed_text(model_output) + machine.finish())
        return ExtractedToolCallInformation(
            tools_called=bool(calls),
            tool_calls=[ToolCall(id=call.id or "", function=call) for call in calls],
            content=content,
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        return delta_message(
            self._machine.feed(delta_token_ids) if delta_token_ids else self._machine.feed_text(delta_text)
        )
