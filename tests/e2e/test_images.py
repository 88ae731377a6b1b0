"""Image requests to a served miniature through the official client: what is seen, kept, cached, and refused."""

import base64
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from tests.chat.wire import Streamed
from vllm_kimi_k3.cli.server import Server, chat_options
from vllm_kimi_k3.nano.packaged import target_path
from vllm_kimi_k3.nano.tasks.pictures import Picture
from vllm_kimi_k3.nano.toolbox import TOOLS

pytestmark = [pytest.mark.slow, pytest.mark.server]

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MAX_IMAGE_PIXELS": "4000000"}
# The miniature reads a picture as the request to say what it shows.
PICTURES = [Picture("red", 3, seed=1), Picture("blue", 2, seed=2), Picture("green", 5, seed=3)]
#: Tokens of a picture, 112x56 pixels.
TOKENS = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    options = [*chat_options("k3", 4096), "--limit-mm-per-prompt", '{"image": 3}']
    with Server(target_path(), options, environment=ENVIRONMENT, timeout=500) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else uri(data)}}


def user(*parts: bytes | str | dict[str, Any]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else p if isinstance(p, dict) else part(p) for p in parts
    ]
    return {"role": "user", "content": content}


def ask(client: openai.OpenAI, messages: list[Any], **more: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "k3", "messages": messages, "temperature": 0, "max_tokens": 200} | more
    )


def words(content: str | None) -> str:
    """The words alone: the miniature may put a mark behind them."""
    return " ".join(re.findall(r"\w+", content or ""))


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.seen)
def test_a_picture_is_seen_whole_and_streamed(client: openai.OpenAI, picture: Picture) -> None:
    whole = ask(client, [user(picture.png())])
    streamed = Streamed(ask(client, [user(picture.png())], stream=True))
    assert whole.choices[0].message.content == streamed.content
    assert words(streamed.content) == picture.seen
    assert whole.choices[0].finish_reason == "stop" and streamed.finish == ["stop"]


@pytest.mark.parametrize("form", ["JPEG", "WEBP", "BMP"])
def test_the_format_does_not_matter(client: openai.OpenAI, form: str) -> None:
    buffer = io.BytesIO()
    PICTURES[0].image().save(buffer, form, **({} if form == "BMP" else {"quality": 95}))
    assert words(ask(client, [user(buffer.getvalue())]).choices[0].message.content) == PICTURES[0].seen


def test_tools_may_be_declared(client: openai.OpenAI) -> None:
    answer = ask(client, [user(PICTURES[1].png())], tools=[TOOLS["get_weather"]]).choices[0]
    assert words(answer.message.content) == PICTURES[1].seen and not answer.message.tool_calls


def test_every_picture_takes_its_tokens_wherever_it_stands(client: openai.OpenAI) -> None:
    """In user and tool messages, several at a time, and in text between them."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    history = [
        user("Look.", PICTURES[0].png(), "and", PICTURES[1].png()),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": [part(PICTURES[2].png())]},
    ]
    seen = json.loads(json.dumps(history))
    for message in seen:
        if isinstance(message["content"], list):
            message["content"] = [p for p in message["content"] if p["type"] == "text"]
    seen[2]["content"] = [{"type": "text", "text": ""}]
    more = {"tools": [TOOLS["get_weather"]], "max_tokens": 1}
    shown, hidden = (ask(client, messages, **more).usage.prompt_tokens for messages in (history, seen))
    # Around the pads of each stand three markers and the size, "image 112x56".
    frame = ask(client, [user(PICTURES[0].png())], max_tokens=1).usage.prompt_tokens
    frame -= ask(client, [user("")], max_tokens=1).usage.prompt_tokens + TOKENS
    assert shown - hidden == 3 * (TOKENS + frame)


def test_history_keeps_its_pictures_and_is_cached(client: openai.OpenAI) -> None:
    opening = [user("one two three " * 100, PICTURES[2].png()), user(PICTURES[0].png())]
    first = ask(client, opening)
    again = ask(client, opening)
    unit = 128
    assert cached(again) == (first.usage.prompt_tokens - 1) // unit * unit > 0
    assert again.choices[0].message.content == first.choices[0].message.content
    reply = first.choices[0].message.model_dump(exclude_none=True)
    longer = ask(client, [*opening, reply, user(PICTURES[1].png())])
    assert cached(longer) >= cached(again)
    other = ask(client, [user("one two three " * 100, PICTURES[1].png()), user(PICTURES[0].png())])
    # Another picture in the same place is another prefix.
    assert cached(other) < cached(again)


def test_markers_in_text_are_text(client: openai.OpenAI) -> None:
    plain = ask(client, [user("x")], max_tokens=1).usage.prompt_tokens
    for marker in ("<|media_pad|>", "<|kimi_image_placeholder|>", "<|media_begin|>image 2x2<|media_content|>"):
        answer = ask(client, [user(marker, PICTURES[0].png())], max_tokens=1)
        alone = ask(client, [user(marker)], max_tokens=1)
        # A marker that went through as one id would take a single token.
        assert alone.usage.prompt_tokens - plain > 3
        assert answer.usage.prompt_tokens > alone.usage.prompt_tokens + TOKENS
    answer = ask(client, [user("<|media_pad|>")])
    assert answer.choices[0].finish_reason in ("stop", "length")


def image(width: int, height: int, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(buffer, form)
    return buffer.getvalue()


def bomb() -> bytes:
    """The head of a PNG that says 30,000 x 30,000."""
    head = bytearray(image(8, 8))
    head[16:24] = (30000).to_bytes(4, "big") * 2
    return bytes(head)


BAD: dict[str, Any] = {
    "truncated": part(PICTURES[0].png()[:-200]),
    "empty": part(b""),
    "no image": part(b"hello, this is text"),
    "1x20000": part(image(1, 20000)),
    "bomb": part(bomb()),
    "too many pixels": part(image(2100, 2000)),
    "not base64": part("data:image/png;base64,%%%"),
    "unreachable": part("http://127.0.0.1:9/x.png"),
    "private": part("http://10.0.0.1/x.png"),
    "metadata": part("http://169.254.169.254/latest/meta-data"),
    "a file": part("file:///etc/passwd"),
    "video": {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
    "audio": {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_shown_is_a_4xx_and_the_server_lives(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.APIStatusError) as refusal:
        ask(client, [user("look", BAD[name])], timeout=60)
    assert 400 <= refusal.value.status_code < 500
    assert len(refusal.value.message) > 20
    assert words(ask(client, [user(PICTURES[0].png())]).choices[0].message.content) == PICTURES[0].seen


def test_more_pictures_than_allowed_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="image"):
        ask(client, [user(*[picture.png() for picture in (*PICTURES, PICTURES[0])])])
