"""The KDA leg: which blocks hold a request's states, and when a state may be found by others.

The block table of a KDA group has a column for each hash unit. Column ``c`` holds the state after ``(c + 1) * unit``
tokens, or nothing (the null block). The last column, followed by the speculator's slots, is the running state. A
prefill step leaves a state in every column that it passes and that has a block; see ``exports.py``, the worker's side.
A state gets its hash when the step that wrote it has been processed, never earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashList, KVCacheBlock, get_block_hash
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.request import Request

from vllm_kimi_k3.cache.book import StateBook
from vllm_kimi_k3.cache.outcome import account
from vllm_kimi_k3.cache.policy import Kind
from vllm_kimi_k3.compat.scheduler import patch_output, patch_scheduler
from vllm_kimi_k3.settings import settings


@dataclass
class _Trail:
    """What a manager remembers of a running request.

    Attributes:
        request: vLLM's.
        start: tokens that it found in the cache.
        columns: how many columns have been looked at for a state to keep.
        plan: the boundaries that are wanted, from :mod:`schedule`.
        poisoned: its values are not finite; nothing of it may be kept.
    """

    request: Request
    plan: Mapping[int, Kind]
    start: int = 0
    columns: int = 0
    poisoned: bool = False


class KdaManager(MambaManager):
    """Manager of one KDA cache group; the groups of a model take the same decisions, read off the pool's book."""

    def __init__(self, kv_cache_spec: MambaSpec, block_pool: BlockPool, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, block_pool, **kwargs)
        # Only here is it certain that this process schedules a K3 model.
        patch_scheduler()
        patch_output()
        self.book = StateBook.of(block_pool, settings().state_share)
        self.book.groups.add(self.kv_cache_group_id)
        self.trails: dict[str, _Trail] = {}
        self._restored: dict[str, BlockHash] = {}

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The deepest state at or before ``max_length`` that is there in all groups; see vLLM's for the arguments."""
        unit, hashed = kv_cache_spec.block_size, block_pool.hash_block_size
        book = StateBook.of(block_pool)
        for index in range(min(max_length // unit, len(block_hashes) * hashed // unit) if book.states else 0, 0, -1):
            if index * unit % alignment_tokens:
                continue
            state = book.find(block_hashes[index * unit // hashed - 1])
            if state is not None:
                nulls = [block_pool.null_block] * (index - 1)
                return tuple([*nulls, state.legs[group]] for group in kv_cache_group_ids), index * unit
        return tuple([] for _ in kv_cache_group_ids), 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that :meth:`allocate_new_blocks` will take, and cached ones that a hit takes out of the free queue."""
        # A hit, and tokens that a connector brings, fill columns before any block is allocated.
        external = total_computed_tokens > num_local_computed_tokens
        columns = max(len(self.req_to_blocks[request_id]), len(new_computed_blocks))
        if external:
            columns = max(columns, cdiv(total_computed_tokens, self.block_size))
        # Whether a request is let in must not depend on states that can be left out.
        plan = {} if apply_admission_cap else self.book.plans.get(request_id, {})
        needed = sum(self.new_columns(plan, columns, num_tokens_main_model)) + int(external)
        return needed + self._get_num_evictable_blocks(new_computed_blocks)

    def new_columns(self, plan: Mapping[int, Kind], columns: int, num_tokens: int) -> list[bool]:
        """For each column to append to a table of ``columns``, whether it gets a block."""
        running = cdiv(num_tokens, self.block_size) - 1
        if running + 1 + self.num_speculative_blocks <= columns:
            return []
        passed = [(column + 1) * self.block_size in plan for column in range(columns, running)]
        slots = running + 1 + self.num_speculative_blocks - max(columns, running)
        return passed + [True] * slots

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Append the columns up to the running state's; those passed get a block where the plan wants a state."""
        # A column that was a speculator's slot and is passed now keeps its block for this step: the worker's table is
        # append-only and still names it, so no one else may have it before the step is over.
        blocks = self.req_to_blocks[request_id]
        before = len(blocks)
        filled = self.new_columns(self.book.plans.get(request_id, {}), before, num_tokens_main_model)
        fresh = iter(self.block_pool.get_new_blocks(sum(filled)))
        blocks.extend(next(fresh) if wanted else self._null_block for wanted in filled)
        return blocks[before:]

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Pin the restored state. It is only read: the worker copies it to the running block before the step."""
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        if new_computed_blocks and (key := new_computed_blocks[-1].block_hash) is not None:
            self._restored[request_id] = get_block_hash(key)
            if self._leads:
                self.book.use(get_block_hash(key))

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Remember the request. vLLM calls this before the step, when none of its states is written."""
        request_id = request.request_id
        self.num_cached_block.setdefault(request_id, 0)
        if request_id not in self.trails:
            restored = self._restored.pop(request_id, None)
            state = self.book.states.get(restored) if restored is not None else None
            start = state.boundary if state is not None else 0
            plan = self.book.plans.get(request_id, {})
            self.trails[request_id] = _Trail(request, plan, start, start // self.block_size)
            if self._leads and not request.num_preemptions and not request.skip_reading_prefix_cache:
                account(self.book, request, start, self.block_size, self.lookahead)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Keep what the processed steps left, then let go of the columns behind the running state."""
        self._keep(request_id, processed_computed_tokens)
        SingleTypeKVCacheManager.remove_skipped_blocks(self, request_id, processed_computed_tokens, num_prompt_tokens)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Keep what the processed steps of a request that ends (or is preempted) left, and give up its blocks."""
        trail = self.trails.get(request_id)
        if trail is not None:
            request = trail.request
            self._keep(request_id, max(request.num_computed_tokens - request.num_in_flight_tokens, 0))
        self.trails.pop(request_id, None)
        self._restored.pop(request_id, None)
        self.book.plans.pop(request_id, None)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    def poison(self, request_id: str) -> None:
        """Keep nothing more of a request, and drop what it left so far."""
        trail = self.trails.get(request_id)
        if trail is None:
            return
        trail.poisoned = True
        for prefix in trail.request.block_hashes[trail.start // self.block_pool.hash_block_size :]:
            self.book.void(prefix, "guard")

    def restored_tokens(self, request_id: str) -> int:
        """Tokens that a request found in the cache."""
        trail = self.trails.get(request_id)
        return trail.start if trail is not None else 0

    @property
    def lookahead(self) -> int:
        """Tokens of a match that a speculator recomputes."""
        return self.block_pool.hash_block_size if self.drop_eagle_checkpoint_block else 0

    @property
    def _leads(self) -> bool:
        """Whether this group is the one that counts for all of them."""
        return self.kv_cache_group_id == min(self.book.groups)

    def _keep(self, request_id: str, processed: int) -> None:
        """Hash the states that lie in columns up to ``processed`` tokens and are worth it."""
        trail = self.trails.get(request_id)
        if trail is None or trail.poisoned:
            return
        blocks = self.req_to_blocks[request_id]
        prompt = trail.request.num_prompt_tokens
        hashed = len(trail.request.block_hashes) * self.block_pool.hash_block_size
        done = min(processed // self.block_size, hashed // self.block_size, len(blocks))
        for column in range(trail.columns, done):
            boundary = (column + 1) * self.block_size
            kind = trail.plan.get(boundary)
            if kind is None and boundary > prompt - 1 and not self.num_speculative_blocks:
                kind = Kind.TURN
            if kind is not None and not blocks[column].is_null:
                self._enter(trail, boundary, kind, blocks[column])
        trail.columns = max(trail.columns, done)

    def _enter(self, trail: _Trail, boundary: int, kind: Kind, block: KVCacheBlock) -> None:
        request, group = trail.request, self.kv_cache_group_id
        prefix = request.block_hashes[boundary // self.block_pool.hash_block_size - 1]
        # The first group decides whether the state is new; the others follow it.
        state = self.book.find(prefix) if self._leads else self.book.states.get(prefix)
        if state is None or self.book.leg(state, group) is None:
            self.block_pool.cache_partial_block(request, block, boundary, group, self.block_size)
            self.book.hold(request, boundary, kind, group, block)
