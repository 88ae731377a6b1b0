"""The MLA leg: cached rows that can be found at every hash unit, not at whole pages only."""

from collections.abc import Sequence

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request

from vllm_kimi_k3.cache.unit import hash_unit


class LatentManager(FullAttentionManager):
    """vLLM's manager of full attention, with a key for every hash unit of a page.

    Rows of a page are written once, in order, so each prefix of a page is as good as the page; vLLM keys whole pages
    and the last unit of a prompt. Lookup and copy on use of a partly matched page are vLLM's.
    """

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Key the pages and units of a request's first ``num_tokens`` tokens; see vLLM's for the arguments."""
        hashed = self.block_pool.hash_block_size
        # A speculator gives one hash block of a match back, so what it matches must be as fine as that.
        step = hashed if self.use_eagle else hash_unit(hashed)
        before = self.num_cached_block.get(request.request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        blocks = self.req_to_blocks[request.request_id]
        limit = min(num_tokens, len(request.block_hashes) * hashed)
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
