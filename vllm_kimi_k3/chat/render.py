"""Renders a conversation into token ids.

Order: declared tools, effort, the messages, tool choice, response format, and the opener of the model's turn. What
comes before an appended message never changes, so the prefix cache keeps it.
"""

from collections.abc import Iterator

from vllm_kimi_k3.chat import declare
from vllm_kimi_k3.chat.errors import RequestError
from vllm_kimi_k3.chat.history import Call, Message, read_messages
from vllm_kimi_k3.chat.request import ChatRequest, ImageSlot
from vllm_kimi_k3.chat.segments import Segments
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer


def render(tokenizer: K3Tokenizer, request: ChatRequest) -> list[int]:
    """Token ids of the prompt.

    Raises:
        RequestError: the request has no rendering; the text names the field, the value and what to send instead.
    """
    return render_messages(tokenizer, request, read_messages(request.messages))


def render_messages(tokenizer: K3Tokenizer, request: ChatRequest, messages: list[Message]) -> list[int]:
    """Like `render`, with the messages already read (and perhaps repaired); `request.messages` is not looked at."""
    return _Rendering(Segments(tokenizer), request, messages).run()


class _Rendering:
    def __init__(self, out: Segments, request: ChatRequest, messages: list[Message]) -> None:
        self._out = out
        self._request = request
        self._messages = messages
        self._slots = _SlotQueue(request)

    def run(self) -> list[int]:
        request = self._request
        thinking = request.thinking
        history, partial = self._split_partial()
        if request.tools:
            self._system("tool-declare", declare.tools_text(request.tools))
        if thinking.enabled and thinking.effort is not None:
            self._system("thinking-effort", declare.effort_text(thinking.effort))
        for message in history:
            self._message(message)
        self._one_shot()
        if partial is not None:
            self._partial(partial)
        elif request.add_generation_prompt:
            self._open_message(Message("assistant"))
            self._out.open("think" if thinking.enabled else "response")
        self._slots.finish()
        return self._out.ids

    def _split_partial(self) -> tuple[list[Message], Message | None]:
        """The messages to render whole, and the last one if the model is to go on with it."""
        last = self._messages[-1] if self._messages else None
        wanted = self._request.continue_final_message
        if not wanted and not (last is not None and last.partial):
            return self._messages, None
        if last is None or last.role != "assistant":
            role = None if last is None else last.role
            raise RequestError("continue_final_message", role, "the last message must be one of the assistant's")
        if last.calls:
            raise RequestError(
                "messages[-1].tool_calls", [call.name for call in last.calls], "a turn with tool calls is complete"
            )
        return self._messages[:-1], last

    def _one_shot(self) -> None:
        """What holds for the next turn only."""
        request = self._request
        choice = declare.tool_choice_text(request.tool_choice)
        has_tools = bool(request.tools) or any(message.tools for message in self._messages)
        if request.tool_choice == "required" and not has_tools:
            raise RequestError("tool_choice", "required", "there are no tools to call; send `tools` or leave this out")
        if choice is not None and has_tools:
            self._system("tool-choice", choice)
        form = declare.response_format_text(request.response_format)
        if form is not None:
            self._system("response-format", form)

    def _system(self, kind: str, text: str) -> None:
        self._out.open("message", [("role", "system"), ("type", kind)])
        self._out.text(text)
        self._out.end_message()

    def _open_message(self, message: Message) -> None:
        attributes = [("role", message.role)]
        if message.role == "tool":
            attributes += [("tool", message.name), ("index", str(message.index))]
        elif message.name:
            attributes.append(("name", message.name))
        self._out.open("message", attributes)

    def _message(self, message: Message) -> None:
        if message.tools:
            self._system("tool-declare", declare.more_tools_text(message.tools, f"{message.field}.tools"))
            return
        self._open_message(message)
        if message.role == "assistant":
            if self._request.thinking.enabled:
                self._element("think", message.reasoning)
            self._out.open("response")
            self._content(message)
            self._out.close("response")
            if message.calls:
                self._calls(message.calls)
        else:
            self._content(message)
        self._out.end_message()

    def _partial(self, message: Message) -> None:
        """A turn that the model goes on with: its last channel stays open."""
        self._open_message(message)
        reasoning = message.reasoning if self._request.thinking.enabled else ""
        if not message.content:
            self._out.open("think" if self._request.thinking.enabled else "response")
            self._out.text(reasoning)
            return
        if reasoning:
            self._element("think", reasoning)
        self._out.open("response")
        self._content(message)

    def _content(self, message: Message) -> None:
        for part in message.content:
            if isinstance(part, str):
                self._out.text(part)
            else:
                self._out.image(self._slots.take())

    def _calls(self, calls: tuple[Call, ...]) -> None:
        self._out.open("tools")
        for index, call in enumerate(calls, 1):
            self._out.open("call", [("tool", call.name), ("index", str(index))])
            if isinstance(call.arguments, str):
                self._element("json", call.arguments, ("type", "object"))
            else:
                for key, kind, text in call.arguments:
                    self._element("argument", text, ("key", key), ("type", kind))
            self._out.close("call")
        self._out.close("tools")

    def _element(self, tag: str, body: str, *attributes: tuple[str, str]) -> None:
        self._out.open(tag, attributes)
        self._out.text(body)
        self._out.close(tag)


class _SlotQueue:
    """Hands the image slots of a request to its image parts, one each."""

    def __init__(self, request: ChatRequest) -> None:
        self._given = None if request.images is None else len(request.images)
        self._slots: Iterator[ImageSlot] = iter(request.images or ())
        self._taken = 0

    def take(self) -> ImageSlot | None:
        """The next slot; None where the request has no slots at all."""
        self._taken += 1
        return next(self._slots, None)

    def finish(self) -> None:
        """Check that there was one slot for each image."""
        if self._given is not None and self._given != self._taken:
            raise RequestError(
                "images", self._given, f"the messages have {self._taken} image parts; give one size each"
            )
