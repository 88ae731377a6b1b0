"""The book of held states: which there are, what they need, and which goes first.

One book belongs to one block pool, in the scheduler's process. A state is a *leg* in each KDA cache group: one block a
group, all of the same prefix hash. The pool keeps what it always keeps, hashes and a queue of free blocks; the book
decides what is taken from it when it runs short.

The order is GreedyDual-Size's: a state ranks by what keeping it saves, per block that giving it up would free, on top
of a clock that stands at the rank of the last one given up. So what was used lately ranks higher, and nothing stays
for ever.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, proxy

from vllm.utils.math_utils import cdiv
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from vllm_kimi_k3.cache.policy import Kind
from vllm_kimi_k3.cache.state import State

#: Hashes of dropped states that are remembered, to say why a later request misses.
_REMEMBERED = 8192
#: Blocks that are needed and passed over in one look for blocks that are not.
_PASSED = 16


class StateBook:
    """The states held in one pool.

    Args:
        pool: vLLM's block pool.
        share: the largest part of the pool's blocks that states may hold.
    """

    _books: ClassVar["WeakKeyDictionary[BlockPool, StateBook]"] = WeakKeyDictionary()

    def __init__(self, pool: BlockPool, share: float) -> None:
        # A book lives as long as its pool; a strong reference back would keep both for ever.
        self.pool: BlockPool = proxy(pool)
        self.budget = int(share * pool.num_gpu_blocks)
        self.groups: set[int] = set()
        #: cache groups of rows: tokens of a page, and the blocks of each running request
        self.row_groups: dict[int, tuple[int, Mapping[str, list[KVCacheBlock]]]] = {}
        self.states: dict[BlockHash, State] = {}
        self.plans: dict[str, dict[int, Kind]] = {}
        self.dropped: OrderedDict[BlockHash, str] = OrderedDict()
        #: what happened so far: (family, label), see :mod:`view`
        self.counts: Counter[tuple[str, str]] = Counter()
        self.viewed: Counter[tuple[str, str]] = Counter()
        #: how many states need a block
        self._needs: Counter[int] = Counter()
        self._clock = 0.0
        self._order: list[tuple[float, int, State]] = []
        self._ticket = count()

    @classmethod
    def of(cls, pool: BlockPool, share: float = 1.0) -> "StateBook":
        """The pool's book, opened with ``share`` if there is none yet."""
        book = cls._books.get(pool)
        if book is None:
            book = cls._books[pool] = cls(pool, share)
        return book

    @property
    def blocks(self) -> int:
        """Blocks that states hold."""
        return len(self.states) * len(self.groups)

    def leg(self, state: State, group: int) -> KVCacheBlock | None:
        """The block of a state in a group, or None if the pool has given it to someone else."""
        block = state.legs.get(group)
        key = make_block_hash_with_group_id(state.hash, group)
        return block if block is not None and self._holds(block, key) else None

    def whole(self, state: State) -> bool:
        """Whether every leg is there."""
        return all(self.leg(state, group) is not None for group in self.groups)

    def needed(self, block: KVCacheBlock) -> bool:
        """Whether a state needs a block."""
        return block.block_id in self._needs

    def find(self, prefix: BlockHash) -> State | None:
        """The state of a prefix, if it can be restored. One that lost a leg is dropped, its other legs with it."""
        state = self.states.get(prefix)
        if state is not None and not self.whole(state):
            self.drop(state, "evicted")
            self.counts["restores", "refused"] += 1
            return None
        return state

    def hold(self, request: Request, boundary: int, kind: Kind, group: int, block: KVCacheBlock) -> None:
        """Enter one leg of a state that a request has left; its block has just been hashed."""
        prefix = request.block_hashes[boundary // self.pool.hash_block_size - 1]
        state = self.states.get(prefix)
        if state is None:
            parent = self._before(request, boundary)
            state = State(prefix, boundary, kind, parent)
            state.rows = self._rows(request, boundary, parent.boundary if parent is not None else 0)
            self._needs.update(row.block_id for row, _ in state.rows.values())
            self.states[prefix] = state
            self.dropped.pop(prefix, None)
            self.counts["kept", kind.name.lower()] += 1
            if parent is not None:
                parent.children.append(state)
                self._rank(parent)
        if group in state.legs:
            self._release(state.legs[group])
        state.legs[group] = block
        self._needs[block.block_id] += 1
        if len(state.legs) == len(self.groups):
            self._see(state)

    def use(self, prefix: BlockHash) -> None:
        """A request starts from a state: it, and the shared ones before it, are used now."""
        state = self.states[prefix]
        state.uses += 1
        self.counts["restores", "done"] += 1
        self._see(state)
        ancestor = state.parent
        while ancestor is not None:
            if ancestor.kind in (Kind.SYSTEM, Kind.FORK):
                self._see(ancestor)
            ancestor = ancestor.parent

    def drop(self, state: State, reason: str) -> None:
        """Void all legs of a state. They, and the rows that no other state needs, are the next to be handed out."""
        del self.states[state.hash]
        self.dropped[state.hash] = reason
        while len(self.dropped) > _REMEMBERED:
            self.dropped.popitem(last=False)
        self.counts["dropped", reason] += 1
        self._unlink(state)
        unneeded = [block for block, _ in state.rows.values() if self._release(block)]
        for group, block in state.legs.items():
            if self._release(block) and self.leg(state, group) is not None:
                self.pool.evict_blocks({block.block_id})
                unneeded.append(block)
        idle = [block for block in unneeded if block.ref_cnt == 0 and not block.is_null]
        for block in idle:
            self.pool.free_block_queue.remove(block)
        self.pool.free_block_queue.prepend_n(idle[::-1])

    def make_room(self, blocks: int, restored: State | None = None, legs: int = 0, worth: float | None = None) -> bool:
        """Have the pool hand out ``blocks`` next that nobody needs, giving up the states that rank lowest for them.

        Args:
            blocks: that are about to be taken from the pool.
            restored: the state that the step starts from, which nothing pins yet.
            legs: how many of the blocks are for states, which must fit into the share that states may hold.
            worth: what the blocks are for saves so many tokens a block; only what ranks lower is given up. None: the
                blocks are taken anyway.

        Returns:
            whether there is room.
        """
        while not (self._ready(blocks) and self.blocks + legs <= max(self.budget, legs)):
            victim = self._lowest(restored)
            if victim is None:
                return False
            if worth is not None and victim.rank > self._clock + worth:
                self._rank(victim)
                return False
            self._clock = max(self._clock, victim.rank)
            self.drop(victim, "displaced")
        return True

    def void(self, prefix: BlockHash, reason: str) -> None:
        """Drop a state if it is held."""
        state = self.states.get(prefix)
        if state is not None:
            self.drop(state, reason)

    def held(self) -> dict[str, int]:
        """Held states by kind."""
        kinds = Counter(state.kind for state in self.states.values())
        return {kind.name.lower(): kinds[kind] for kind in Kind}

    def _holds(self, block: KVCacheBlock, key: Any) -> bool:
        return self.pool.cached_block_hash_to_block.contain(key, block.block_id)

    def _before(self, request: Request, boundary: int) -> State | None:
        """The deepest state of a request before a boundary."""
        hashes = request.block_hashes
        for index in range(boundary // self.pool.hash_block_size - 2, -1, -1):
            state = self.states.get(hashes[index])
            if state is not None:
                return state
        return None

    def _rows(self, request: Request, boundary: int, start: int) -> dict[tuple[int, int], tuple[KVCacheBlock, Any]]:
        """The pages of a request from the one that ``start`` lies in up to a boundary; see :class:`State`."""
        found = {}
        for group, (page, tables) in self.row_groups.items():
            table = tables.get(request.request_id, ())
            for index in range(start // page, min(cdiv(boundary, page), len(table))):
                end = min((index + 1) * page, boundary)
                prefix = request.block_hashes[end // self.pool.hash_block_size - 1]
                found[group, index] = table[index], make_block_hash_with_group_id(prefix, group)
        return found

    def _release(self, block: KVCacheBlock) -> bool:
        """One state less needs a block; whether none does now."""
        self._needs[block.block_id] -= 1
        if self._needs[block.block_id] > 0:
            return False
        del self._needs[block.block_id]
        return True

    def _unlink(self, state: State) -> None:
        """Take a state out of its tree: those after it follow the one before it, and need what it needed."""
        parent = state.parent
        if parent is not None:
            parent.children.remove(state)
        for child in state.children:
            child.parent = parent
            inherited = {place: row for place, row in state.rows.items() if place not in child.rows}
            self._needs.update(block.block_id for block, _ in inherited.values())
            child.rows.update(inherited)
            if parent is not None:
                parent.children.append(child)
        for touched in (*state.children, *([parent] if parent is not None else ())):
            self._rank(touched)

    def _see(self, state: State) -> None:
        state.seen = self._clock
        self._rank(state)

    def _rank(self, state: State) -> None:
        """Enter a state's rank anew."""
        blocks = len(self.groups)
        if not state.children:
            blocks += sum(self._needs[block.block_id] == 1 for block, _ in state.rows.values())
        state.rank = state.seen + state.value / blocks
        heapq.heappush(self._order, (state.rank, next(self._ticket), state))
        if len(self._order) > 64 + 4 * len(self.states):
            self._order = [(held.rank, next(self._ticket), held) for held in self.states.values()]
            heapq.heapify(self._order)

    def _ready(self, blocks: int) -> bool:
        """Whether nobody needs the next blocks to be handed out. Needed ones that are met go to the queue's end."""
        queue = self.pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        passed = 0
        while blocks > 0:
            if block is None or block.next_free_block is None:
                return False
            following = block.next_free_block
            if self.needed(block):
                if passed == _PASSED:
                    return False
                passed += 1
                queue.remove(block)
                queue.append(block)
            else:
                blocks -= 1
            block = following
        return True

    def _lowest(self, restored: State | None) -> State | None:
        """Take the state that ranks lowest out of the order; one in use stays. What lost something is dropped."""
        kept = []
        found = None
        while self._order and found is None:
            entry = heapq.heappop(self._order)
            rank, _, state = entry
            if self.states.get(state.hash) is not state or rank != state.rank:
                continue
            if state is restored or not state.idle:
                kept.append(entry)
            elif not self.whole(state) or not all(self._holds(*row) for row in state.rows.values()):
                self.drop(state, "evicted")
            else:
                found = state
        for entry in kept:
            heapq.heappush(self._order, entry)
        return found
