"""What a prompt's ids say about the place where generation starts."""

from collections.abc import Sequence

from vllm_kimi_k3.chat.pieces import Pieces

# A message header is a few tokens; a separator further away than this does not belong to it.
_HEADER_LENGTH = 256


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
