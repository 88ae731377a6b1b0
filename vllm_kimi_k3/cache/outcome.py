"""What became of a prompt's tokens when it was looked up: found, or missed for which reason."""

from vllm.v1.request import Request

from vllm_kimi_k3.cache.book import StateBook
from vllm_kimi_k3.cache.policy import floor_to

#: Why a state went, in the words of the book, and what that is called for the prompt that misses it.
_LOST = {"evicted": "evicted", "displaced": "evicted", "guard": "guard"}
#: A prompt's tokens by what became of them; they add up to the prompt.
TOKENS = ("hit", "unit", "no_state", "evicted", "guard", "new")


def account(book: StateBook, request: Request, start: int, unit: int, lookahead: int = 0) -> None:
    """Enter in the book's counts what became of a prompt that has just been given its first slots.

    From the prompt's start: ``hit`` was restored; ``evicted`` and ``guard`` reach to the deepest state that was held
    once, and went for that reason (or is held, and its rows went); ``no_state`` reaches to where cached rows end to
    match; ``new`` was never seen; ``unit`` is the end of the prompt, which no boundary that can be looked up covers.

    Args:
        book: of the pool.
        request: with the hashes of its prompt.
        start: tokens that it found in the cache.
        unit: tokens of a hash unit.
        lookahead: tokens of a match that a speculator recomputes.
    """
    length = request.num_prompt_tokens
    last = max(floor_to(length - 1 - lookahead, unit), start)
    lost, reason = _deepest_lost(book, request, start, last, unit)
    known = min(max(lost, floor_to(request.shared_prefix_boundary, unit)), last)
    book.counts["tokens", "hit"] += start
    book.counts["tokens", reason] += lost - start
    book.counts["tokens", "no_state"] += known - lost
    book.counts["tokens", "new"] += last - known
    book.counts["tokens", "unit"] += length - last


def _deepest_lost(book: StateBook, request: Request, start: int, last: int, unit: int) -> tuple[int, str]:
    """The deepest boundary in (start, last] at which a state was held, and why it could not be restored."""
    for boundary in range(last, start, -unit):
        prefix = request.block_hashes[boundary // book.pool.hash_block_size - 1]
        if prefix in book.states:
            # Its rows are gone: both legs or none.
            book.counts["restores", "refused"] += 1
            return boundary, "evicted"
        if prefix in book.dropped:
            return boundary, _LOST[book.dropped[prefix]]
    return start, "evicted"
