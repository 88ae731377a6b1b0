"""What a prompt's ids say about the place where generation starts."""

from collections.abc import Sequence

from vllm_kimi_k3.chat.parser import CALLING, Mode, OutputParser
from vllm_kimi_k3.chat.pieces import Pieces
from vllm_kimi_k3.chat.repairs import ignore

# A message header is a few tokens; a separator further away than this does not belong to it.
_HEADER_LENGTH = 256
# A marker of the message's own channels, blanks included, is at most this many tokens.
_MARKER_LENGTH = 16


def message_start(pieces: Pieces, ids: Sequence[int]) -> int | None:
    """Index of the first id inside the last message of a prompt, None if no message opens in it.

    Looks from the end, so that the cost is that of the last message and not of the prompt.
    """
    specials = pieces.specials
    for index in range(len(ids) - 1, -1, -1):
        if ids[index] != specials.open:
            continue
        header = b""
        for after in range(index + 1, min(index + _HEADER_LENGTH, len(ids))):
            token = ids[after]
            if token == specials.sep and header.split()[:1] == [b"message"]:
                return after + 1
            if token in specials:
                break
            header += pieces.bytes_of(token)
    return None


def resume(parser: OutputParser, prompt_ids: Sequence[int]) -> bool:
    """Let `parser` start where a prompt's last message leaves off. False, and no change, if no message is open."""
    start = message_start(parser.pieces, prompt_ids)
    if start is None:
        return False
    prompt = OutputParser(parser.pieces, Mode.BETWEEN, on_repair=ignore)
    prompt.feed(prompt_ids[start:])
    if prompt.mode in (Mode.DONE, *CALLING):
        return False
    parser.continue_from(prompt)
    return True


def reasoning_ended(pieces: Pieces, ids: Sequence[int], start: Mode) -> bool:
    """Whether what is generated after `ids` lies outside think.

    `ids` are a prompt, or an output without one, which then begins in `start`.
    """
    opened = message_start(pieces, ids)
    parser = OutputParser(pieces, start if opened is None else Mode.BETWEEN, on_repair=ignore)
    parser.feed(ids[opened or 0 :])
    return parser.mode is not Mode.THINK


def reasoning_ends_in(pieces: Pieces, ids: Sequence[int], new: int) -> bool:
    """Whether think, open before the last `new` ids, is over after them. Cost does not depend on `len(ids)`."""
    begin = len(ids) - new
    for back in range(begin - 1, max(begin - _MARKER_LENGTH, 0) - 1, -1):
        if ids[back] in (pieces.specials.open, pieces.specials.close):
            begin = back
            break
        if ids[back] == pieces.specials.sep:
            break
    parser = OutputParser(pieces, Mode.THINK, on_repair=ignore)
    parser.feed(ids[begin:])
    return parser.mode is not Mode.THINK


def content_start(pieces: Pieces, ids: Sequence[int], start: Mode) -> int:
    """Index of the first id after the reasoning: behind the tag that closed it, or at a tag that ended it unclosed."""
    parser = OutputParser(pieces, start, on_repair=ignore)
    marker = 0
    for index, token in enumerate(ids):
        if parser.mode is not Mode.THINK:
            return index if parser.mode is Mode.BETWEEN else marker
        if token in (pieces.specials.open, pieces.specials.close):
            marker = index
        parser.feed((token,))
    return len(ids) if parser.mode in (Mode.THINK, Mode.BETWEEN, Mode.DONE) else marker
