"""A held state: what it stands for, what it needs, and what it is worth."""

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock

from vllm_kimi_k3.cache.policy import Kind, value


@dataclass(eq=False)
class State:
    """A held state.

    States form trees: a state's parent is the deepest held one before it. What lies between the two, rows and the
    state, is lost or kept together: rows that no state follows are of no use to anyone.

    Attributes:
        hash: of the prefix that it stands for.
        boundary: tokens of that prefix.
        kind: why it is kept.
        parent: the state before it, if one is held.
        children: the states that follow it.
        legs: KDA cache group to block.
        rows: cache group of rows and number of the page to the page and its key, from the page that the parent ends in
            to its own last one. Two requests may have a page of each other's rows; this is the one that this state's
            request had.
        uses: how often it was restored.
        seen: the book's clock when it was last used, or left.
        rank: the book's order; the lowest goes first.
    """

    hash: BlockHash
    boundary: int
    kind: Kind
    parent: "State | None" = None
    children: list["State"] = field(default_factory=list)
    legs: dict[int, KVCacheBlock] = field(default_factory=dict)
    rows: dict[tuple[int, int], tuple[KVCacheBlock, BlockHashWithGroupId]] = field(default_factory=dict)
    uses: int = 0
    seen: float = 0.0
    rank: float = 0.0

    @property
    def gain(self) -> int:
        """Tokens between it and the state before it."""
        return self.boundary - (self.parent.boundary if self.parent is not None else 0)

    @property
    def value(self) -> float:
        """Tokens of recomputation that it is expected to save; see :func:`policy.value`."""
        return value(self.kind, self.gain, self.uses, superseded=bool(self.children))

    @property
    def idle(self) -> bool:
        """Whether no running request has it."""
        return all(block.ref_cnt == 0 for block in self.legs.values())
