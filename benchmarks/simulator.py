"""vLLM's real scheduler and cache managers over a pretended worker: no model, every decision.

The pretended worker keeps, for each block, what a real one would have written there: for an MLA page the prefix that
each row stands for, for a KDA page the prefix of its state. A step that would compute from anything else fails.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_kimi_k3.cache.exports import step_exports

NULL_PAGE = 0


class WrongRestoreError(AssertionError):
    """A step would have computed from a page that does not hold what its request needs."""


def extend(chain: list[int], tokens: Sequence[int]) -> list[int]:
    """Append the 64-bit hashes of the prefixes that ``tokens`` add to ``chain``; ``chain[n]`` is that of n tokens."""
    for token in tokens:
        chain.append(hash((chain[-1], token)))
    return chain


@dataclass
class _Row:
    """A request as a worker knows it: its tables, its tokens' prefixes, its running column, its last token."""

    tables: list[list[int]]
    chain: list[int]
    column: int | None = None
    sampled: int = 0


@dataclass
class Worker:
    """Pretends to run steps.

    Attributes:
        specs: of the cache groups.
        ours: whether states are left in every interior column that has a block, as our metadata builder has it.
        rows: running requests.
        pages: block to what it holds: the prefix of a state, or the prefixes of rows.
        poison: prefixes whose logits are not finite.
    """

    specs: list[KVCacheSpec]
    ours: bool
    rows: dict[str, _Row] = field(default_factory=dict)
    pages: dict[int, Any] = field(default_factory=dict)
    poison: set[int] = field(default_factory=set)

    def run(self, step: SchedulerOutput, requests: dict[str, Request]) -> ModelRunnerOutput:
        """One step: bring tables up to date, copy, restore, compute, sample."""
        self._receive(step)
        # A worker reads all sources before it writes, so a page copied into is no source in the same step.
        copies = [(copy, self.pages.get(copy.src_block_id)) for copy in step.kv_cache_block_copies or ()]
        for copy, content in copies:
            self.pages[copy.dst_block_id] = list(content) if isinstance(content, list) else content
        work = []
        for name, count in step.num_scheduled_tokens.items():
            computed = self._computed[name]
            row = self.rows[name]
            known = requests[name].all_token_ids[len(row.chain) - 1 : computed + count]
            # Ahead of the scheduler, only the worker knows the last token yet.
            missing = computed + count - (len(row.chain) - 1) - len(known)
            extend(row.chain, known + [row.sampled] * missing)
            work.append((name, row, computed, count))
        for _, row, computed, count in work:
            self._advance(row, computed, count)
        for _, row, computed, count in work:
            self._check(row, computed, count)
        sampled, nans = [], {}
        for name, row, computed, count in work:
            self._write(row, computed, count)
            last = row.chain[computed + count]
            nans[name] = int(last in self.poison)
            row.sampled = last % 900
            sampled.append([row.sampled] if computed + count >= requests[name].num_tokens else [])
        names = [name for name, *_ in work]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            num_nans_in_logits=nans,
        )

    def _receive(self, step: SchedulerOutput) -> None:
        for name in step.finished_req_ids:
            self.rows.pop(name, None)
        for name in step.preempted_req_ids or ():
            self.rows.pop(name, None)
        self._computed = {}
        for new in step.scheduled_new_reqs:
            self.rows[new.req_id] = _Row([list(ids) for ids in new.block_ids], [0])
            self._computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            self._computed[name] = computed
            if name in cached.resumed_req_ids:
                self.rows[name] = _Row([list(ids) for ids in blocks], [0])
                continue
            for table, ids in zip(self.rows[name].tables, blocks or (), strict=False):
                table.extend(ids)

    def _states(self, row: _Row) -> list[tuple[list[int], int]]:
        return [
            (table, spec.block_size)
            for table, spec in zip(row.tables, self.specs, strict=True)
            if isinstance(spec, MambaSpec)
        ]

    def _advance(self, row: _Row, computed: int, count: int) -> None:
        """vLLM's copy of the running state to the column that the step ends in."""
        unit = self._states(row)[0][1]
        before = row.column if row.column is not None else (computed - 1) // unit
        row.column = (computed + count - 1) // unit
        if before not in (-1, row.column):
            for table, _ in self._states(row):
                self.pages[table[row.column]] = self.pages.get(table[before])

    def _check(self, row: _Row, computed: int, count: int) -> None:
        for table, spec in zip(row.tables, self.specs, strict=True):
            if isinstance(spec, MambaSpec):
                if computed and self.pages.get(table[(computed + count - 1) // spec.block_size]) != row.chain[computed]:
                    raise WrongRestoreError(f"a state is not that of the first {computed} tokens")
                continue
            for index in range(-(-computed // spec.block_size)):
                want = row.chain[index * spec.block_size + 1 : min((index + 1) * spec.block_size, computed) + 1]
                held = self.pages.get(table[index])
                if not isinstance(held, list) or held[: len(want)] != want:
                    raise WrongRestoreError(f"rows of page {index} are not those of the first {computed} tokens")

    def _write(self, row: _Row, computed: int, count: int) -> None:
        end = computed + count
        for table, spec in zip(row.tables, self.specs, strict=True):
            size = spec.block_size
            if isinstance(spec, MambaSpec):
                if self.ours and count > 1:
                    for _, tokens, page in step_exports([table], [end], [count], size):
                        self.pages[page] = row.chain[computed + tokens]
                self.pages[table[(end - 1) // size]] = row.chain[end]
                continue
            for position in range(computed, end):
                page = table[position // size]
                held = self.pages.get(page)
                if not isinstance(held, list) or position % size == 0:
                    held = self.pages[page] = []
                del held[position % size :]
                held.append(row.chain[position + 1])


class Simulation:
    """A scheduler over a pool of a given size.

    Args:
        config: an engine's config; its cache settings are changed.
        groups: the cache groups.
        blocks: blocks of the pool, the null block among them.
        hash_block: tokens of vLLM's hash block.
        page: tokens of an MLA page.
        ours: whether the groups are this plugin's.
        check: pretend to run steps and check them; else only count.
        ahead: schedule a step before the one before it has been processed.
    """

    def __init__(
        self,
        config: VllmConfig,
        groups: list[KVCacheGroupSpec],
        blocks: int,
        *,
        hash_block: int,
        page: int,
        ours: bool,
        check: bool = True,
        ahead: bool = False,
    ) -> None:
        cache = config.cache_config
        cache.block_size, cache.mamba_cache_mode, cache.num_gpu_blocks = page, "align", blocks
        config.scheduler_config.async_scheduling = ahead
        caches = KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=0, hash_block_size=hash_block)
        kind = AsyncScheduler if ahead else Scheduler
        self.scheduler = kind(config, caches, StructuredOutputManager(config), page, hash_block)
        hasher = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        init_none_hash(hasher)
        self._hasher = get_request_block_hasher(hash_block, hasher)
        self.worker = Worker([group.kv_cache_spec for group in groups], ours) if check else None
        self.ahead = ahead
        self._count = 0
        self._flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.requests: dict[str, Request] = {}
        #: request to the tokens that it found in the cache when it was first scheduled
        self.cached: dict[str, int] = {}
        #: seconds of this thread's work in the scheduler, of each step
        self.spent: list[float] = []

    def add(self, tokens: Sequence[int], new: int = 1) -> Request:
        """Queue a request for ``new`` output tokens."""
        self._count += 1
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0)
        params.update_from_generation_config({}, 0)
        request = Request(f"r{self._count}", list(tokens), params, None, block_hasher=self._hasher)
        self.requests[request.request_id] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> bool:
        """Schedule a step and process one; False when there was nothing to do."""
        begun = time.thread_time()
        output = self.scheduler.schedule()
        spent = time.thread_time() - begun
        self.cached.update((new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs)
        busy = output.total_num_scheduled_tokens > 0
        if busy or output.finished_req_ids:
            self._flight.append((output, self._run(output)))
        if self._flight and (len(self._flight) > self.ahead or not busy):
            step = self._flight.popleft()
            begun = time.thread_time()
            self.scheduler.update_from_output(*step)
            spent += time.thread_time() - begun
        self.spent.append(spent)
        return busy or bool(self._flight) or self.scheduler.has_unfinished_requests()

    def _run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        if self.worker is not None:
            return self.worker.run(output, self.requests)
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.requests[name]
            # The scheduler has counted this step's tokens as computed already.
            sampled.append([1] if request.num_computed_tokens >= request.num_tokens else [])
        return ModelRunnerOutput(names, {name: index for index, name in enumerate(names)}, sampled)

    def finish(self, limit: int = 100_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(limit):
            if not self.step():
                return
        raise RuntimeError(f"requests are not done after {limit} steps")

    def serve(self, tokens: Sequence[int], new: int = 1) -> Request:
        """One request alone, from start to end."""
        request = self.add(tokens, new)
        self.finish()
        return request

    def abort(self, request: Request) -> None:
        """As a client that goes away."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def engine_config(checkpoint: Path, **settings: Any) -> VllmConfig:
    """The config of an engine that serves a checkpoint with prefix caching."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"enable_prefix_caching": True, "skip_tokenizer_init": True}
    config = EngineArgs(model=str(checkpoint), **defaults | settings).create_engine_config()
    # No model will run, so its own limit does not matter.
    config.model_config.max_model_len = config.scheduler_config.max_model_len = 1 << 20
    return config
