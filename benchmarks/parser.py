"""Time per token of the output parser, and tokens until the first argument text, beside vLLM's own K3 parser.

    python -m benchmarks.parser [--json FILE]

Both parse the same streams through the same call, `parse_delta` with one token, as vLLM's server does. "At n tokens"
is the mean over the last 1,000 of n tokens; what comes before them is fed in one delta. Time is that of the process on
the CPU, and the smallest of nine repeats counts, as a busy machine only adds to it.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import vllm
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.kimi_k3 import KimiK3Parser as TheirParser
from vllm.reasoning.kimi_k3_reasoning_parser import KimiK3ReasoningParser as TheirReasoningParser
from vllm.tool_parsers.kimi_k3_tool_parser import KimiK3ToolParser as TheirToolParser

from vllm_kimi_k3.chat.parser import OutputParser
from vllm_kimi_k3.chat.vllm_messages import pieces_of
from vllm_kimi_k3.chat.vllm_parsers import KimiK3Parser, KimiK3ReasoningParser, KimiK3ToolParser
from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer
from vllm_kimi_k3.nano.vocabulary import write_tokenizer

LENGTHS = (2_000, 8_000, 32_000, 200_000)
WINDOW = 1_000
REPEATS = 9
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"type": "object", "properties": {}}}}]
TEXT = 'The quick brown fox said "well, 17 dogs are lazy" and went on; über naïve 😀 lines\nfollow. '
THINK_CLOSE = "<|close|>think<|sep|><|open|>response<|sep|>"
CALL_OPEN = (
    '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|>'
    '<|open|>argument key="body" type="string"<|sep|>'
)


class Ours(KimiK3Parser):
    reasoning_parser_cls = KimiK3ReasoningParser
    tool_parser_cls = KimiK3ToolParser


class Theirs(TheirParser):
    reasoning_parser_cls = TheirReasoningParser
    tool_parser_cls = TheirToolParser


def stream(tokenizer: KimiK3Tokenizer, opening: str, length: int) -> list[int]:
    """`length` ids: `opening`, then text."""
    ids = tokenizer.encode(opening)
    text = tokenizer.k3.encode(TEXT)
    return (ids + text * (length // len(text) + 1))[:length]


def request() -> ChatCompletionRequest:
    return ChatCompletionRequest(model="k3", messages=[{"role": "user", "content": "Hi"}], tools=TOOLS)


def microseconds(step: Callable[[int], Any], positions: Sequence[int]) -> float:
    """Mean time of `step` over `positions`."""
    start = time.process_time()
    for position in positions:
        step(position)
    return (time.process_time() - start) / len(positions) * 1e6


def at_length(parser_class: Any, tokenizer: KimiK3Tokenizer, ids: list[int]) -> float:
    """Microseconds a token over the last tokens of a stream."""
    chat = request()
    texts = [tokenizer.k3.decode([token]) for token in ids]
    head = len(ids) - WINDOW
    best = float("inf")
    for _ in range(REPEATS):
        parser = parser_class(tokenizer, chat.tools)
        parser.parse_delta("".join(texts[:head]), ids[:head], chat, None, finished=False)

        def step(at: int, parser: Any = parser) -> None:
            parser.parse_delta(texts[at], [ids[at]], chat, None, finished=False)

        best = min(best, microseconds(step, range(head, len(ids))))
    return best


def whole_stream(tokenizer: KimiK3Tokenizer, ids: list[int], machine: bool) -> float:
    """Microseconds a token over a whole stream of ours; with `machine` the state machine alone."""
    chat, best = request(), float("inf")
    for _ in range(REPEATS):
        parser = Ours(tokenizer, chat.tools)
        core = OutputParser(pieces_of(tokenizer))

        def step(at: int, parser: Ours = parser, core: OutputParser = core) -> None:
            if machine:
                core.feed((ids[at],))
            else:
                parser.parse_delta("", [ids[at]], chat, None, finished=False)

        best = min(best, microseconds(step, range(len(ids))))
    return best


def first_argument(parser_class: Any, tokenizer: KimiK3Tokenizer, length: int) -> int:
    """Tokens of a string argument of `length` tokens until text of it is sent; its key comes before."""
    opening = tokenizer.encode(CALL_OPEN)
    closing = tokenizer.encode("<|close|>argument<|sep|><|close|>call<|sep|>")
    ids = [*stream(tokenizer, CALL_OPEN, len(opening) + length), *closing]
    chat, sent = request(), ""
    parser = parser_class(tokenizer, chat.tools)
    for at, token in enumerate(ids):
        delta = parser.parse_delta(tokenizer.k3.decode([token]), [token], chat, None, finished=at == len(ids) - 1)
        sent += "".join(call.function.arguments or "" for call in delta.tool_calls) if delta else ""
        if len(sent) > len('{"body": "'):
            return at + 1 - len(opening)
    raise AssertionError("no argument text at all")


def cpu() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def measure(tokenizer: KimiK3Tokenizer) -> dict[str, Any]:
    rows = []
    for name, opening in (("answer", THINK_CLOSE), ("argument", CALL_OPEN)):
        for length in LENGTHS:
            ids = stream(tokenizer, opening, length)
            ours, theirs = (at_length(parser, tokenizer, ids) for parser in (Ours, Theirs))
            rows.append({"stream": name, "tokens": length, "ours_us": round(ours, 2), "vllm_us": round(theirs, 2)})
    longest = stream(tokenizer, THINK_CLOSE, LENGTHS[-1])
    return {
        "date": date.today().isoformat(),
        "cpu": cpu(),
        "python": platform.python_version(),
        "vllm": vllm.__version__,
        "at_length": rows,
        "whole_stream_us": round(whole_stream(tokenizer, longest, machine=False), 2),
        "machine_us": round(whole_stream(tokenizer, longest, machine=True), 2),
        "first_argument": [
            {
                "argument_tokens": n,
                "ours": first_argument(Ours, tokenizer, n),
                "vllm": first_argument(Theirs, tokenizer, n),
            }
            for n in (200, 2_000)
        ],
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| stream | tokens | this plugin, µs a token | vLLM's own, µs a token |", "|---|---:|---:|---:|"]
    for row in result["at_length"]:
        lines.append(f"| {row['stream']} | {row['tokens']:,} | {row['ours_us']} | {row['vllm_us']} |")
    lines += [
        "",
        "| length of the string argument | first text, this plugin | first text, vLLM's own |",
        "|---:|---:|---:|",
    ]
    for row in result["first_argument"]:
        lines.append(f"| {row['argument_tokens']:,} | token {row['ours']} | token {row['vllm']} |")
    return "\n".join(lines)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    arguments.add_argument("--json", type=Path, help="write the figures to this file")
    arguments.add_argument("--vocabulary", type=Path, help="directory with tiktoken.model; default: the miniature's")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if options.vocabulary is None:
            write_tokenizer(Path(scratch))
        result = measure(KimiK3Tokenizer.from_pretrained(options.vocabulary or scratch))
    print(f"{result['date']}, {result['cpu']}, Python {result['python']}, vLLM {result['vllm']}\n")
    print(table(result))
    whole, machine = result["whole_stream_us"], result["machine_us"]
    print(f"\nWhole stream of {LENGTHS[-1]:,} tokens: {whole} µs a token, {machine} µs in the state machine.")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
