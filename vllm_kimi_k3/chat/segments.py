"""A prompt under construction: ids, appended segment by segment.

Control tokens come only from `open`, `close`, `end_message` and `image`. Every other text is tokenised on its own, as
ordinary text, so nothing a user, a tool or a model wrote can turn into one.
"""

from collections.abc import Sequence

from vllm_kimi_k3.chat.request import ImageSlot
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.chat.tokens import IMAGE_PLACEHOLDER


class Segments:
    """Token ids of a prompt so far (`ids`)."""

    def __init__(self, tokenizer: K3Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special
        self.ids: list[int] = []

    def open(self, tag: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        """`<|open|>tag key="value"…<|sep|>`; each attribute is four segments, its value escaped."""
        fragment = self._tokenizer.encode_fragment
        self.ids.append(self._special.open)
        self.ids += fragment(tag)
        for key, value in attributes:
            self.ids += fragment(f" {key}")
            self.ids += fragment('="')
            self.ids += fragment(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.ids += fragment('"')
        self.ids.append(self._special.sep)

    def close(self, tag: str) -> None:
        """`<|close|>tag<|sep|>`."""
        self.ids.append(self._special.close)
        self.ids += self._tokenizer.encode_fragment(tag)
        self.ids.append(self._special.sep)

    def end_message(self) -> None:
        """`<|close|>message<|sep|><|end_of_msg|>`."""
        self.close("message")
        self.ids.append(self._special.end_of_msg)

    def text(self, text: str) -> None:
        """A body, raw: no escapes, no special tokens."""
        self.ids += self._tokenizer.encode(text)

    def image(self, slot: ImageSlot | None) -> None:
        """The media block of one image, or the placeholder's text where nothing is known about the image."""
        if slot is None:
            self.text(IMAGE_PLACEHOLDER)
            return
        self.ids.append(self._special.media_begin)
        self.text(f"image {slot.width}x{slot.height}")
        self.ids.append(self._special.media_content)
        self.ids += [self._special.media_pad] * slot.pads
        self.ids.append(self._special.media_end)
