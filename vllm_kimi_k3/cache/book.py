"""The book of held states: what each is, what it saves, and which goes first.

One book belongs to one block pool, in the scheduler's process. A state is a *leg* in each KDA cache group: one block a
group, all of the same prefix hash. The pool keeps what it always keeps, hashes and a queue of free blocks in the order
of last use; the book adds what the pool cannot know, and corrects the queue's order with it.
"""

import heapq
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, proxy

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_kimi_k3.cache.policy import Kind, value

#: Hashes of dropped states that are remembered, to say why a later request misses.
_REMEMBERED = 8192
#: States whose legs are checked for eviction by the pool at each reclaim.
_SWEPT = 4


@dataclass
class State:
    """A held state.

    Attributes:
        hash: of the prefix that it stands for.
        boundary: tokens of that prefix.
        kind: why it is kept.
        gain: tokens since the state before it.
        parent: hash of the state before it in the request that left it.
        legs: cache group to block.
        uses: how often it was restored.
        superseded: a deeper state of the same conversation has taken over.
    """

    hash: BlockHash
    boundary: int
    kind: Kind
    gain: int
    parent: BlockHash | None
    legs: dict[int, KVCacheBlock] = field(default_factory=dict)
    uses: int = 0
    superseded: bool = False

    @property
    def value(self) -> float:
        return value(self.kind, self.gain, self.uses, self.superseded)


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
        self.states: OrderedDict[BlockHash, State] = OrderedDict()
        self.plans: dict[str, dict[int, Kind]] = {}
        self.dropped: OrderedDict[BlockHash, str] = OrderedDict()
        self.counts: Counter[str] = Counter()
        self._victims: list[tuple[float, int, State]] = []
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
        return (
            block if block is not None and self.pool.cached_block_hash_to_block.contain(key, block.block_id) else None
        )

    def whole(self, state: State) -> bool:
        """Whether every leg is there."""
        return all(self.leg(state, group) is not None for group in self.groups)

    def find(self, prefix: BlockHash) -> State | None:
        """The state of a prefix, if it can be restored. One that lost a leg is dropped, its other legs with it."""
        state = self.states.get(prefix)
        if state is not None and not self.whole(state):
            self.drop(state, "evicted")
            return None
        return state

    def hold(
        self, prefix: BlockHash, boundary: int, kind: Kind, before: BlockHash | None, group: int, block: KVCacheBlock
    ) -> State:
        """Enter one leg of a state whose block has just been hashed."""
        state = self.states.get(prefix)
        if state is None:
            parent = self.states.get(before) if before is not None else None
            state = State(prefix, boundary, kind, boundary - (parent.boundary if parent else 0), before)
            self.states[prefix] = state
            self.counts["held_" + kind.name.lower()] += 1
            if kind is Kind.RUNG:
                self.expose(state)
        state.legs[group] = block
        return state

    def use(self, prefix: BlockHash) -> None:
        """A request starts from a state: it, and the shared ones before it, are used now."""
        state = self.states[prefix]
        state.uses += 1
        self.states.move_to_end(prefix)
        ancestor = self._parent(state)
        while ancestor is not None:
            if ancestor.kind in (Kind.SYSTEM, Kind.FORK):
                self._touch(ancestor)
            ancestor = self._parent(ancestor)

    def supersede(self, prefix: BlockHash | None) -> None:
        """A conversation has gone on from a state: it and those before it, up to a shared one, may go first."""
        state = self.states.get(prefix) if prefix is not None else None
        while state is not None and not state.superseded and state.kind < Kind.SYSTEM and state.uses < 2:
            state.superseded = True
            self.expose(state)
            state = self._parent(state)

    def expose(self, state: State) -> None:
        """Let a state go before anything that was used more recently, once the pool runs short."""
        heapq.heappush(self._victims, (state.value, next(self._ticket), state))

    def drop(self, state: State, reason: str) -> None:
        """Void all legs of a state; its blocks are the next to be handed out."""
        del self.states[state.hash]
        self.dropped[state.hash] = reason
        while len(self.dropped) > _REMEMBERED:
            self.dropped.popitem(last=False)
        self.counts["dropped_" + reason] += 1
        for group in state.legs:
            block = self.leg(state, group)
            if block is None:
                continue
            self.pool.evict_blocks({block.block_id})
            if block.ref_cnt == 0:
                self.pool.free_block_queue.remove(block)
                self.pool.free_block_queue.prepend_n([block])

    def make_room(self, blocks: int, restored: BlockHash | None = None) -> int:
        """Give up exposed states before the pool takes something better, and keep to the budget.

        Args:
            blocks: that are about to be taken from the pool.
            restored: prefix of the state that the step starts from, which nothing pins yet.

        Returns:
            how many blocks of new states the budget then still allows.
        """
        for prefix in [prefix for prefix, _ in zip(self.states, range(_SWEPT), strict=False)]:
            if self.find(prefix) is not None:
                break
        while self._victims and self._is_short(blocks):
            self._drop_victim(restored)
        while self.blocks + blocks > self.budget and (self._victims or self._expose_oldest(restored)):
            self._drop_victim(restored)
        return self.budget - self.blocks

    def void(self, prefix: BlockHash, reason: str) -> None:
        """Drop a state if it is held."""
        state = self.states.get(prefix)
        if state is not None:
            self.drop(state, reason)

    def held(self) -> dict[str, int]:
        """Held states by kind."""
        kinds = Counter(state.kind for state in self.states.values())
        return {kind.name.lower(): kinds[kind] for kind in Kind}

    def _parent(self, state: State) -> State | None:
        return self.states.get(state.parent) if state.parent is not None else None

    def _touch(self, state: State) -> None:
        self.states.move_to_end(state.hash)
        for group in state.legs:
            block = self.leg(state, group)
            if block is not None and block.ref_cnt == 0:
                self.pool.free_block_queue.remove(block)
                self.pool.free_block_queue.append(block)

    def _is_short(self, blocks: int) -> bool:
        """Whether one of the next blocks to be handed out holds something that a request could hit."""
        block = self.pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(blocks):
            if block is None or block.next_free_block is None:
                return False
            if block.block_hash is not None:
                return True
            block = block.next_free_block
        return False

    def _drop_victim(self, restored: BlockHash | None) -> None:
        _, _, state = heapq.heappop(self._victims)
        # Used again after it was exposed, or in use now: it stays, as any other state does.
        if self.states.get(state.hash) is state and state.uses < 2 and state.hash != restored and _idle(state):
            self.drop(state, "displaced")

    def _expose_oldest(self, restored: BlockHash | None) -> bool:
        for state in self.states.values():
            if state.hash != restored and _idle(state):
                state.uses = min(state.uses, 1)
                self.expose(state)
                return True
        return False


def _idle(state: State) -> bool:
    return all(block.ref_cnt == 0 for block in state.legs.values())


def snapshot(book: StateBook) -> dict[str, Any]:
    """The book's numbers, for people and metrics."""
    return {
        "states": book.held(),
        "blocks": book.blocks,
        "budget_blocks": book.budget,
        "pool_blocks": book.pool.num_gpu_blocks,
        "counts": dict(book.counts),
    }
