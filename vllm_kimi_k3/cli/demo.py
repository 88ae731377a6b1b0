"""``vllm-kimi-k3 demo``: serve the miniature K3, talk to it through the openai client, and check what it says."""

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

from vllm_kimi_k3.cli.server import Server, chat_options

OPTIONS = chat_options("nano", 4096)


def add_parser(subparsers: Any) -> None:
    """Add ``demo``."""
    parser = subparsers.add_parser("demo", help="serve the miniature K3, talk to it and check what it says")
    parser.set_defaults(run=_run)


def _run(_: argparse.Namespace) -> int:
    from vllm_kimi_k3.nano.packaged import target_path

    model = target_path()
    print(f"vllm serve {Path(model).name} {' '.join(OPTIONS)}")
    began = time.monotonic()
    with Server(model, OPTIONS, environment={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        print(f"ready after {time.monotonic() - began:.0f} s at {server.url}")
        wrong = converse(server.url)
        status = server.stop()
    print(
        f"\nserver stopped with exit code {status}; {len(wrong)} wrong answers{': ' if wrong else ''}{', '.join(wrong)}"
    )
    return status or bool(wrong)


def converse(url: str) -> list[str]:
    """Two conversations that share system prompt and tools; returns what was answered wrongly."""
    from vllm_kimi_k3.nano.dialogue import start
    from vllm_kimi_k3.nano.tasks import tools

    rng = random.Random(4)
    scene, dialogue = start(rng, "max", 6)
    while len(scene.tools) < 4 or not dialogue.messages:
        scene, dialogue = start(rng, "max", 6)
    first = Talk(url, [*dialogue.messages], scene.tools)
    _use_tool(first, tools.use(scene))
    named = first.say("Think of five numbers and name three of them.")
    thought = re.findall(r"\d+", named.reasoning.partition("Five numbers:")[2])[:5]
    first.check(
        "names three of the five it thought of", len(thought) == 5 and re.findall(r"\d+", named.content) == thought[:3]
    )
    rest = first.say("What are the other two numbers?")
    first.check(
        "knows the other two from its earlier thinking",
        thought[3:] != [] and re.findall(r"\d+", rest.content) == thought[3:],
    )

    print("\n== a second user, the same system prompt and tools")
    second = Talk(url, [*dialogue.messages], scene.tools)
    _use_tool(second, tools.use(scene))
    second.check("reads the shared beginning from the prefix cache", second.cached > 0)
    return first.wrong + second.wrong


def _use_tool(talk: "Talk", exchange: Any) -> None:
    """A wish, the calls it should lead to, the tool's results, and the answer that should tell them."""
    from vllm_kimi_k3.nano.tasks.exchange import Results, Turn

    wanted, results, told = exchange.steps
    assert isinstance(wanted, Turn) and isinstance(results, Results) and isinstance(told, Turn)
    reply = talk.say(exchange.user)
    expected = [(call.name, call.arguments) for call in wanted.calls]
    talk.check("calls the right tool with exact arguments", reply.calls == expected)
    talk.give(results.contents)
    talk.check("uses the result", told.key in talk.say(None).content)


class Reply:
    """What came: thinking, answer, and calls with their ids."""

    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.ids: list[str] = []
        self.names: list[str] = []
        self.arguments: list[str] = []

    @property
    def calls(self) -> list[tuple[str, Any]]:
        """Name and parsed arguments of each call."""
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    def message(self) -> dict[str, Any]:
        """As it goes back into the history: with its thinking."""
        calls = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
            for key, name, arguments in zip(self.ids, self.names, self.arguments, strict=True)
        ]
        message = {"role": "assistant", "content": self.content, "reasoning": self.reasoning}
        return message | ({"tool_calls": calls} if calls else {})


class Talk:
    """One user's conversation, streamed and printed as it goes."""

    def __init__(self, url: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        self.messages, self.tools = messages, tools
        self.wrong: list[str] = []
        #: Prompt tokens of the first request that came from the prefix cache.
        self.cached = -1
        self._reply = Reply()
        names = ", ".join(tool["function"]["name"] for tool in tools)
        print(f"\nsystem: {messages[0]['content']}\ntools: {names}")

    def say(self, text: str | None) -> Reply:
        """Send a user's message, or only what the tools gave; returns the answer, which joins the history."""
        if text is not None:
            print(f"\nuser: {text}")
            self.messages.append({"role": "user", "content": text})
        began, self._reply = time.monotonic(), Reply()
        usage: Any = None
        request: dict[str, Any] = {"messages": self.messages, "tools": self.tools, "temperature": 0, "max_tokens": 300}
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in self.client.chat.completions.create(model="nano", **request, **options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                self._add(choice.delta)
        print()
        seconds = time.monotonic() - began
        cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
        self.cached = cached if self.cached < 0 else self.cached
        print(
            f"  [{usage.prompt_tokens} prompt tokens, {cached} cached; {usage.completion_tokens} generated in "
            f"{seconds:.1f} s, {usage.completion_tokens / seconds:.0f} a second]"
        )
        self.messages.append(self._reply.message())
        return self._reply

    def give(self, results: tuple[str, ...]) -> None:
        """What the tools of the last answer's calls gave."""
        for key, result in zip(self._reply.ids, results, strict=False):
            print(f"tool: {result}")
            self.messages.append({"role": "tool", "tool_call_id": key, "content": result})

    def check(self, what: str, good: bool) -> None:
        """Print and count whether an answer is right."""
        print(f"  {'right' if good else 'WRONG'}: {what}")
        if not good:
            self.wrong.append(what)

    def _add(self, delta: Any) -> None:
        reply = self._reply
        reasoning, content = getattr(delta, "reasoning", None) or "", delta.content or ""
        label = ("nano thinks: " if reasoning and not reply.reasoning else "") + (
            "\nnano: " if content and not reply.content else ""
        )
        reply.reasoning += reasoning
        reply.content += content
        print(label + reasoning + content, end="", flush=True)
        for call in delta.tool_calls or ():
            if call.id:
                reply.ids.append(call.id)
                reply.names.append(call.function.name)
                reply.arguments.append("")
                print(f"\nnano calls {call.function.name} ", end="")
            reply.arguments[-1] += call.function.arguments or ""
            print(call.function.arguments or "", end="", flush=True)
