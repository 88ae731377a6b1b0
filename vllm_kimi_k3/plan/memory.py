"""Where every byte of a GPU goes, and how much context and how many requests that leaves room for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vllm_kimi_k3.plan import release
from vllm_kimi_k3.plan.gpus import GIB, Gpu
from vllm_kimi_k3.plan.pages import Pages, pages
from vllm_kimi_k3.plan.parallel import Layout
from vllm_kimi_k3.plan.release import Draft
from vllm_kimi_k3.plan.weights import rank_bytes
from vllm_kimi_k3.plan.workspace import activation_bytes, outside_bytes

#: A draft's Markov matrices, [vocabulary, 256] twice in bf16, are whole on every rank.
_MARKOV_BYTES = 2 * 163840 * 256 * 2


@dataclass(frozen=True)
class Deployment:
    """What is to be served, on what.

    Attributes:
        gpu: the accelerator.
        layout: sizes of the parallel groups.
        kv_dtype: of MLA rows.
        draft: the speculator, if any.
        drafts: tokens that it drafts a step.
        context: tokens of a request that are asked for.
        requests: how many of them at once, over all data-parallel replicas.
        utilisation: share of a GPU's memory that vLLM may use, ``--gpu-memory-utilization``.
        batched_tokens: ``--max-num-batched-tokens``.
        seqs: ``--max-num-seqs``.
        prefix_caching: whether states are kept for other requests.
        state_width: bytes of a value of the recurrent state: 4, or 2 with ``--mamba-ssm-cache-dtype bfloat16``.
        width: bytes of a value of the model's dtype.
        pool: bytes of the cache on one rank, instead of what is left over.
        workspace: bytes of activations and of what lies outside the allocator, instead of the estimate.
        text: the text config.
        vision: the vision config, or None if the vision tower is not loaded.
    """

    gpu: Gpu
    layout: Layout
    kv_dtype: str = "bf16"
    draft: Draft | None = None
    drafts: int = 0
    context: int = 131072
    requests: int = 1
    utilisation: float = 0.92
    batched_tokens: int = 8192
    seqs: int = 64
    prefix_caching: bool = True
    state_width: int = 4
    width: int = 2
    pool: int | None = None
    workspace: int | None = None
    text: Any = field(default_factory=lambda: release.TEXT, repr=False)
    vision: Mapping[str, Any] | None = field(default_factory=lambda: release.VISION, repr=False)

    def replace(self, **changes: Any) -> "Deployment":
        """The same with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Stage:
    """One rank of a pipeline stage.

    Attributes:
        layers: of the stage.
        parts: bytes by what they are for, weights by kind first.
        pool: bytes that are left for the cache; negative if the rest does not fit.
        pages: the cache's geometry.
    """

    layers: range
    parts: dict[str, int]
    pool: int
    pages: Pages

    @property
    def blocks(self) -> int:
        """Block ids in the pool."""
        return max(self.pool, 0) // self.pages.block_bytes


class Plan:
    """A deployment, worked out.

    Args:
        deployment: what is to be served.

    Raises:
        ValueError: the parallel sizes do not divide what they slice, or the KV dtype is not known.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment

    @cached_property
    def stages(self) -> list[Stage]:
        """The ranks that stand for the pipeline stages."""
        d = self.deployment
        cut = d.layout.stages(d.text.num_hidden_layers)
        geometry = pages(
            d.text, d.layout.tp, d.kv_dtype, d.drafts, d.draft, cut, d.prefix_caching, d.width, d.state_width
        )
        return [self._stage(layers, one, last=layers is cut[-1]) for layers, one in zip(cut, geometry, strict=True)]

    def _stage(self, layers: range, geometry: Pages, last: bool) -> Stage:
        d = self.deployment
        # Every stage creates the vision tower.
        parts = {f"weights: {k}": v for k, v in rank_bytes(d.text, d.vision, d.layout.share(layers), d.width).items()}
        if d.draft and last:
            parts["draft"] = _draft_bytes(d.draft, d.layout.tp)
        if d.workspace is None:
            rows = d.seqs * (1 + d.drafts)
            parts["activations"] = activation_bytes(d.text, d.layout.tp, d.batched_tokens, rows, d.width)
            parts["outside the allocator"] = outside_bytes(d.gpu.architecture)
        else:
            parts["workspace"] = d.workspace
        pool = self.budget - sum(parts.values()) if d.pool is None else d.pool
        return Stage(layers, parts, pool, geometry)

    @property
    def budget(self) -> int:
        """Bytes of one GPU that vLLM may use."""
        return int(self.deployment.gpu.memory * self.deployment.utilisation)

    @property
    def tightest(self) -> Stage:
        """The stage whose pool has the fewest blocks; vLLM gives every stage as many."""
        return min(self.stages, key=lambda stage: (stage.blocks, stage.pool))

    @property
    def blocks(self) -> int:
        """Block ids of a replica that requests can hold; vLLM keeps one for itself."""
        return max(self.tightest.blocks - 1, 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest single request."""
        return min(self.tightest.pages.context(self.blocks), self.deployment.text.max_position_embeddings)

    def requests(self, context: int) -> int:
        """How many requests of so many tokens run at once, over all replicas, sharing nothing."""
        return self.blocks // self.tightest.pages.blocks(context) * self.deployment.layout.dp

    @property
    def tokens(self) -> int:
        """Tokens of MLA rows that a replica's pool holds, beside the state of one request."""
        return self.tightest.pages.context(self.blocks)

    @property
    def fits(self) -> bool:
        """Whether what is asked for fits."""
        d = self.deployment
        return d.context <= self.longest and d.requests <= self.requests(d.context)

    @property
    def usage(self) -> dict[str, int]:
        """Bytes of the tightest stage's pool that the requests asked for take, by kind; what is left keeps prefixes."""
        d, stage = self.deployment, self.tightest
        each = -(-d.requests // d.layout.dp)
        states = each * stage.pages.kda_groups * stage.pages.running * stage.pages.block_bytes
        rows = each * stage.pages.blocks(d.context) * stage.pages.block_bytes - states
        return {"KDA states": states, "MLA pages": rows, "kept prefixes": max(stage.pool - states - rows, 0)}


def _draft_bytes(draft: Draft, tp: int) -> int:
    return (draft.stored_bytes - _MARKOV_BYTES) // tp + _MARKOV_BYTES


def gib(count: int) -> str:
    """Bytes in GiB with two digits."""
    return f"{count / GIB:.2f}"
