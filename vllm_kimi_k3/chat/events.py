"""What a parsed output consists of, in order of arrival."""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """Text of the think channel."""

    text: str


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; `call` counts calls of this output from 0. Comes once, before the call's arguments."""

    call: int
    id: str
    name: str


class Arguments(NamedTuple):
    """The next piece of a call's arguments: JSON text that continues the pieces before it."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The call's arguments are complete: all pieces together are one JSON value. Missing for a call that was cut."""

    call: int


class End(NamedTuple):
    """Nothing follows. `cut` is true when the output stopped without an end of message."""

    cut: bool


Event = Reasoning | Content | CallStart | Arguments | CallEnd | End
