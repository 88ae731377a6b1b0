"""The MLA leg: cached rows that can be found at every hash unit, and only once they are written."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_kimi_k3.cache.book import StateBook
from vllm_kimi_k3.cache.unit import hash_unit
from vllm_kimi_k3.settings import settings


class LatentManager(FullAttentionManager):
    """vLLM's manager of full attention, with a key for every hash unit of a page.

    Rows of a page are written once, in order, so each prefix of a page is as good as the page; vLLM keys whole pages
    and the last unit of a prompt. Lookup and copy on use of a partly matched page are vLLM's.

    vLLM gives rows their key before the step that writes them. A page found that way and matched in part would be
    copied before it is written, as copies come first in a step; so rows get their key when states do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: running requests, and how many of their tokens vLLM lets be keyed
        self._running: dict[str, tuple[Request, int]] = {}
        #: how many units and pages of them were written when their rows were keyed last
        self._keyed: dict[str, tuple[int, int]] = {}
        self.book = StateBook.of(self.block_pool, settings().state_share)
        self.book.row_groups[self.kv_cache_group_id] = self.block_size, self.req_to_blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Remember the request. vLLM calls this before the step, when the last of ``num_tokens`` are not written."""
        self.num_cached_block.setdefault(request.request_id, 0)
        self._running[request.request_id] = request, num_tokens

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Key what the processed steps of a request wrote; no row of full attention is ever skipped."""
        self._key(request_id, processed_computed_tokens)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Key what the processed steps of a request that ends (or is preempted) wrote, and give up its blocks.

        Pages that no state needs cannot be restored: they lose their keys, so that the pool hands them out first. The
        KDA groups come before this one and have kept their last states by now.
        """
        if request_id in self._running:
            request, _ = self._running[request_id]
            self._key(request_id, request.num_computed_tokens - request.num_in_flight_tokens)
        self._running.pop(request_id, None)
        self._keyed.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        self.block_pool.evict_blocks(
            {block.block_id for block in blocks if block.ref_cnt == 1 and not self.book.needed(block)}
        )
        return blocks

    def poison(self, request_id: str) -> None:
        """Key nothing more of a request."""
        self._running.pop(request_id, None)

    def _key(self, request_id: str, processed: int) -> None:
        """Key the pages and units of a request's first ``processed`` tokens."""
        if request_id not in self._running:
            return
        request, cacheable = self._running[request_id]
        hashed = self.block_pool.hash_block_size
        # A speculator gives one hash block of a match back, so what it matches must be as fine as that.
        step = hashed if self.use_eagle else hash_unit(hashed)
        before = self.num_cached_block.get(request_id, 0)
        limit = min(processed, cacheable, len(request.block_hashes) * hashed)
        written = limit // step, limit // self.block_size
        # A generated token ends a unit once in many steps.
        if limit <= 0 or written == self._keyed.get(request_id):
            return
        self._keyed[request_id] = written
        # Only windowed attention looks at the boundaries at which a request may be replayed.
        super().cache_blocks(request, limit, replay_boundaries=())
        blocks = self.req_to_blocks[request_id]
        for index in range(before, min(len(blocks), -(-limit // self.block_size))):
            first = index * self.block_size
            last = min(limit, first + self.block_size)
            # From the end of the page: vLLM takes a longer key to replace the shorter ones of a page.
            for boundary in range(last // step * step, first, -step):
                if boundary == blocks[index].block_hash_num_tokens:
                    continue
                self.block_pool.cache_partial_block(
                    request, blocks[index], boundary, self.kv_cache_group_id, self.block_size
                )
