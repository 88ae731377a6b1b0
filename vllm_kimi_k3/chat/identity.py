"""Digests that tell conversations apart by what their participants can see.

Thinking is left out of them, since clients drop it, and so are the spelling of JSON and blanks at the ends of a text,
since clients change them. Everything else counts, images too.
"""

import json
import os
from collections.abc import Iterable
from hashlib import blake2b

from vllm_kimi_k3.chat.history import Call, Image, Message
from vllm_kimi_k3.chat.spelling import spell_arguments

# Digests of API keys and conversations mean nothing outside this process.
_SECRET = os.urandom(32)


def digest(*parts: str | bytes) -> bytes:
    """One digest of the parts; where one ends and the next begins counts."""
    state = blake2b(key=_SECRET, digest_size=20)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.digest()


def follow(conversation: bytes, message: Message) -> bytes:
    """The conversation after `message`, given the conversation before it."""
    return digest(conversation, message.role, message.name, *_visible(message))


def of_turn(conversation: bytes, message: Message) -> bytes:
    """An assistant turn, by what is visible of it and by the conversation before it."""
    return digest(b"turn", conversation, *_visible(message))


def _visible(message: Message) -> Iterable[str]:
    yield message.text.strip()
    for part in message.content:
        if isinstance(part, Image):
            yield part.source
    for call in message.calls:
        yield call.name
        yield _canonical(call)
    for tool in message.tools:
        yield json.dumps(tool, sort_keys=True, default=str)


def _canonical(call: Call) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    values: dict[str, object] = {}
    for key, kind, text in call.arguments:
        try:
            values[key] = text if kind == "string" else json.loads(text)
        except (ValueError, RecursionError):
            values[key] = text
    return json.dumps(values, sort_keys=True)


def visible_call(name: str, arguments: str) -> Call:
    """A call as the server sent it, for the digest of its turn."""
    return Call(None, name, spell_arguments(arguments, "arguments"))
