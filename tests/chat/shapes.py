"""Raw outputs seen from Kimi K3, and what must come of them. Generation starts inside think unless said."""

from dataclasses import dataclass, field

from vllm_kimi_k3.chat.parser import Mode
from vllm_kimi_k3.chat.repairs import Repair

_TAIL = "<C>message<S><E>"


def call(name: str, *arguments: str, index: int = 1) -> str:
    return f'<O>call tool="{name}" index="{index}"<S>{"".join(arguments)}<C>call<S>'


def argument(key: str, kind: str, value: str) -> str:
    return f'<O>argument key="{key}" type="{kind}"<S>{value}<C>argument<S>'


def tools(*calls: str) -> str:
    return f"<O>tools<S>{''.join(calls)}<C>tools<S>"


@dataclass(frozen=True)
class Shape:
    name: str
    output: str
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    start: Mode = Mode.THINK


SRC = argument("path", "string", "src")
LIST = ("list_dir", '{"path": "src"}')

SHAPES = [
    Shape(
        "plain answer",
        "hm<C>think<S><O>response<S>Hello<C>response<S>" + _TAIL,
        "hm",
        "Hello",
    ),
    Shape(
        "thinking, answer and call",
        f"hm<C>think<S><O>response<S>Ok.<C>response<S>{tools(call('list_dir', SRC))}" + _TAIL,
        "hm",
        "Ok.",
        [LIST],
    ),
    Shape(
        "R1 orphan response close, then tools",
        f"need a list first. A small repo, it seems.<C>response<S>{tools(call('list_dir', SRC))}" + _TAIL,
        "need a list first. A small repo, it seems.",
        calls=[LIST],
        repairs=[Repair.RESPONSE_CLOSE_ORPHAN],
    ),
    Shape(
        "R2 from think into tools",
        f"look at it{tools(call('t'))}" + _TAIL,
        "look at it",
        calls=[("t", "{}")],
        repairs=[Repair.THINK_CLOSE_INFERRED],
    ),
    Shape("R3 message close only", "<C>think<S><O>response<S>Hello" + _TAIL, content="Hello"),
    Shape(
        "R4 response only",
        "<O>response<S>42<C>response<S>" + _TAIL,
        content="42",
        repairs=[Repair.THINK_CLOSE_INFERRED],
    ),
    Shape(
        "R5 zero-length think",
        "42<C>response<S>" + _TAIL,
        "42",
        "42",
        repairs=[Repair.RESPONSE_CLOSE_ORPHAN, Repair.ANSWER_FROM_REASONING],
    ),
    Shape(
        "R6 response inside think",
        "hm <O>response<S>42<C>response<S><C>message<S>",
        "hm ",
        "42",
        repairs=[Repair.THINK_CLOSE_INFERRED],
    ),
    Shape("R7 hand-written marker", "<|open|>think<|sep|total is twelve", "<|open|>think<|sep|total is twelve"),
    Shape(
        "R8 special opener, hand-written separator",
        "<O>think<|sep|total is twelve",
        "think<|sep|total is twelve",
        repairs=[Repair.TAG_BROKEN],
    ),
    Shape(
        "R9 cut in an argument",
        'x<C>think<S><O>tools<S><O>call tool="w" index="1"<S><O>argument key="body" type="string"<S>line one\nli',
        "x",
        calls=[("w", '{"body": "line one\\nli')],
        repairs=[Repair.CALL_CUT],
    ),
    Shape(
        "R10 cut in a marker spelled as text",
        '<C>think<S><O>tools<S><O>call tool="w" index="1"<S><O>argument key="body" type="string"<S>src<|clo',
        calls=[("w", '{"body": "src<|clo')],
        repairs=[Repair.CALL_CUT],
    ),
    Shape(
        "R10 cut in a marker",
        '<C>think<S><O>tools<S><O>call tool="w" index="1"<S><O>argument key="body" type="string"<S>src<C>argu',
        calls=[("w", '{"body": "src')],
        repairs=[Repair.TAG_CUT, Repair.CALL_CUT],
    ),
    Shape("R11 blanks in markers", "Hi<C> response <S><C> message<S>", content="Hi", start=Mode.RESPONSE),
    Shape(
        "R13 call after tools closed",
        f"<C>think<S>{tools(call('a'))}{call('b')}{tools(call('c', SRC))}" + _TAIL,
        calls=[("a", "{}")],
        repairs=[Repair.CALL_OUTSIDE_TOOLS, Repair.TOOLS_REPEATED, Repair.CALL_OUTSIDE_TOOLS, Repair.TAG_UNKNOWN],
    ),
    Shape(
        "R14 argument quotes a marker",
        f"<C>think<S>{tools(call('w', argument('body', 'string', '<|close|>argument<|sep|>')))}" + _TAIL,
        calls=[("w", '{"body": "<|close|>argument<|sep|>"}')],
    ),
    Shape(
        "R15 argument with a demonstration",
        f"<C>think<S>{tools(call('w', argument('body', 'string', '```<|open|>tools<|sep|>…```')))}" + _TAIL,
        calls=[("w", '{"body": "```<|open|>tools<|sep|>…```"}')],
    ),
    Shape(
        "R16 index goes on from earlier calls",
        f"<C>think<S>{tools(call('a', index=8), call('b', index=9))}" + _TAIL,
        calls=[("a", "{}"), ("b", "{}")],
    ),
    Shape(
        "R20 many markers",
        f".<C>think<S><O>response<S>Ok.<C>response<S>{tools(call('list_dir', SRC), call('list_dir', SRC))}" + _TAIL,
        ".",
        "Ok.",
        [LIST, LIST],
    ),
    Shape("R21 cut thinking", "let me consider the first case and then", "let me consider the first case and then"),
    Shape(
        "R22 end inside think",
        "I have the answer.<E>",
        "I have the answer.",
        repairs=[Repair.THINK_CLOSE_INFERRED],
    ),
    Shape(
        "R23 monologue as answer",
        "<C>think<S><O>response<S>Wait, let me check...<C>response<S>",
        content="Wait, let me check...",
    ),
    Shape(
        "R25 prose about a marker",
        "<C>think<S><O>response<S>The token <|open|> starts a tag<C>response<S>" + _TAIL,
        content="The token <|open|> starts a tag",
    ),
    Shape("thinking off", "Hello<C>response<S>" + _TAIL, content="Hello", start=Mode.RESPONSE),
    Shape(
        "no response opener",
        "hm<C>think<S>\n Hello<C>message<S><E>",
        "hm",
        "\n Hello",
        repairs=[Repair.RESPONSE_OPEN_INFERRED],
    ),
    Shape(
        "second message",
        '<C>think<S><O>response<S>Hi<C>message<S><O>message role="user"<S>Me too<E>',
        content="Hi",
    ),
    Shape(
        "second message without a close",
        '<C>think<S><O>response<S>Hi<O>message role="user"<S>Me too<E>',
        content="Hi",
        repairs=[Repair.SECOND_MESSAGE],
    ),
    Shape(
        "text after the answer",
        "<C>think<S><O>response<S>Hi<C>response<S>\n more text" + _TAIL,
        content="Hi",
        repairs=[Repair.TEXT_DROPPED],
    ),
    Shape(
        "text among calls",
        f"<C>think<S><O>tools<S>\n{call('a')}, and \n then{call('b')}<C>tools<S>bye" + _TAIL,
        calls=[("a", "{}"), ("b", "{}")],
        repairs=[Repair.TEXT_DROPPED, Repair.TEXT_DROPPED],
    ),
    Shape(
        "second response",
        "<C>think<S><O>response<S>Hi<C>response<S><O>response<S>Ho<C>response<S>" + _TAIL,
        content="Hi",
        repairs=[Repair.RESPONSE_REPEATED],
    ),
    Shape(
        "answer after an orphan close",
        "hm<C>response<S><O>response<S>Hi<C>response<S>" + _TAIL,
        "hm",
        "Hi",
        repairs=[Repair.RESPONSE_CLOSE_ORPHAN],
    ),
    Shape(
        "orphan close, then cut",
        "42<C>response<S>",
        "42",
        "42",
        repairs=[Repair.RESPONSE_CLOSE_ORPHAN, Repair.ANSWER_FROM_REASONING],
    ),
    Shape(
        "unknown element",
        "a<O>note<S>x<C>note<S>b<C>think<S><O>response<S>c<O>note<S>y<C>note<S>d<C>response<S>" + _TAIL,
        "ab",
        "cd",
        repairs=[Repair.TAG_UNKNOWN, Repair.TAG_UNKNOWN],
    ),
    Shape(
        "call outside tools",
        f"a{call('rm', SRC)}b<C>think<S><O>response<S>c<C>response<S>" + _TAIL,
        "ab",
        "c",
        repairs=[Repair.CALL_OUTSIDE_TOOLS, Repair.TAG_UNKNOWN],
    ),
    Shape(
        "call not closed",
        f"<C>think<S><O>tools<S>{call('a', SRC)[: -len('<C>call<S>')]}{call('b')}<C>tools<S>" + _TAIL,
        calls=[("a", '{"path": "src"}'), ("b", "{}")],
        repairs=[Repair.CALL_CLOSE_INFERRED],
    ),
    Shape(
        "argument not closed",
        f"<C>think<S>{tools(call('a', SRC[: -len('<C>argument<S>')], argument('n', 'number', '7')))}" + _TAIL,
        calls=[("a", '{"path": "src", "n": 7}')],
        repairs=[Repair.ARGUMENT_CLOSE_INFERRED],
    ),
    Shape(
        "tools not closed",
        f"<C>think<S><O>tools<S>{call('a')}" + _TAIL,
        calls=[("a", "{}")],
    ),
    Shape(
        "end inside an argument",
        '<C>think<S><O>tools<S><O>call tool="a" index="1"<S><O>argument key="k" type="string"<S>v<E>',
        calls=[("a", '{"k": "v"}')],
        repairs=[Repair.ARGUMENT_CLOSE_INFERRED, Repair.CALL_CLOSE_INFERRED],
    ),
    Shape(
        "call without a name",
        f'<C>think<S><O>tools<S><O>call index="1"<S>{SRC}<C>call<S>{call("b")}<C>tools<S>' + _TAIL,
        calls=[("b", "{}")],
        repairs=[Repair.CALL_WITHOUT_NAME, Repair.TAG_UNKNOWN],
    ),
    Shape(
        "separator missing",
        "hm<C>think<O>response<S>Hi<C>response<S>" + _TAIL,
        "hm",
        "Hi",
        repairs=[Repair.SEP_MISSING],
    ),
    Shape(
        "stray separator and foreign special token",
        "hm<S><C>think<S><O>response<S>Hi<C>response<S>" + _TAIL,
        "hm",
        "Hi",
        repairs=[Repair.TAG_STRAY],
    ),
    Shape(
        "attributes in any order and quoting",
        "<C>think<S><O>tools<S><O>call index='3' tool='it&quot;s'<S>"
        '<O>argument type=string key="a\'&amp;amp;"<S>v<C>argument<S><C>call<S><C>tools<S>' + _TAIL,
        calls=[('it"s', '{"a\'&amp;": "v"}')],
    ),
    Shape(
        "thinking again",
        "a<C>think<S><O>response<S>b<O>think<S>c<C>think<S><O>response<S>d<C>response<S>" + _TAIL,
        "ac",
        "bd",
        repairs=[Repair.RESPONSE_CLOSE_INFERRED],
    ),
    Shape(
        "think opener repeated",
        "<O>think<S>hm<C>think<S>Hi",
        "hm",
        "Hi",
        repairs=[Repair.THINK_REPEATED, Repair.RESPONSE_OPEN_INFERRED],
    ),
    Shape("nothing", ""),
    Shape("end at once", "<E>", repairs=[Repair.THINK_CLOSE_INFERRED]),
]
