"""The text between `<|open|>` or `<|close|>` and `<|sep|>`: a tag's name and attributes."""

from typing import NamedTuple

import regex

# A longer header is no tag: a tool name or an argument key of this size does not exist.
MAX_HEADER = 65_536

_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"']+)"""
_NAME = r"[\w.:\-]+"
_HEADER = regex.compile(rf"\s*(?P<name>{_NAME})(?:\s+(?P<key>{_NAME})\s*=\s*(?P<value>{_VALUE}))*\s*")


class Tag(NamedTuple):
    """Name and unescaped attributes of a tag; of an attribute written twice the last one counts."""

    name: str
    attributes: dict[str, str]


def unescape(value: str) -> str:
    """Undo the escaping of attribute values: `&quot;` first, then `&amp;`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


class Header:
    """A tag's text as it arrives. Total work is linear in its length."""

    def __init__(self, closing: bool) -> None:
        self.closing = closing
        self._parts: list[str] = []
        self._length = 0
        self._check_at = 0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    def push(self, text: str) -> bool:
        """Add text. False once the whole can no longer become a tag."""
        self._parts.append(text)
        self._length += len(text)
        if self._length > MAX_HEADER:
            return False
        if self._length < self._check_at:
            return True
        # Short headers are checked at every piece, long ones each time they have doubled.
        self._check_at = 2 * self._length if self._length > 256 else 0
        return _HEADER.fullmatch(self.text, partial=True) is not None

    def tag(self) -> Tag | None:
        """The tag that the text spells, or None."""
        match = _HEADER.fullmatch(self.text)
        if match is None:
            return None
        values = (value[1:-1] if value[0] in "\"'" else value for value in match.captures("value"))
        return Tag(match["name"], dict(zip(match.captures("key"), map(unescape, values), strict=True)))
