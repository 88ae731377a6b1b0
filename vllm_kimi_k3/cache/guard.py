"""What happens when a request's logits are not finite.

A NaN in a state, in a cached row or in an activation reaches the logits of every later token of its request: the
recurrence keeps it, attention spreads it. So the worker's count of NaN logits a request and step is the one check that
sees them all, and since a state gets its hash only after its step has been processed, none of them is stored.
"""

import time
from collections import deque
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kimi_k3.cache.latent import LatentManager
from vllm_kimi_k3.cache.manager import KdaManager
from vllm_kimi_k3.cache.schedule import state_managers
from vllm_kimi_k3.compat.scheduler import fail_request

logger = init_logger("vllm.vllm_kimi_k3")

#: So many failed requests within so many seconds, and the engine says that it is not ready.
RECURRENCE, WINDOW = 3, 600.0
#: The largest part of the pool that is withheld; the block that was withheld first then goes back.
QUARANTINE = 1 / 16


class Guard:
    """Fails requests with NaN logits, and keeps others from what they wrote.

    Args:
        managers: of the KDA groups.
        clock: seconds.
    """

    def __init__(self, managers: list[KdaManager], clock: Any = time.monotonic) -> None:
        self.managers = managers
        self.book = managers[0].book
        self.clock = clock
        self.failures: deque[float] = deque(maxlen=RECURRENCE)
        self.withheld: deque[KVCacheBlock] = deque()

    @property
    def ready(self) -> bool:
        """False while failures recur."""
        return len(self.failures) < RECURRENCE or self.clock() - self.failures[0] > WINDOW

    def inspect(self, scheduler: Any, output: Any) -> None:
        """Before vLLM reads a step's output: take out the rows with NaN logits, and have their requests failed.

        Args:
            scheduler: vLLM's.
            output: its ``ModelRunnerOutput``; the tokens sampled from such a row are removed.
        """
        for name, nans in (output.num_nans_in_logits or {}).items():
            request = scheduler.requests.get(name)
            if not nans or request is None or request.is_finished():
                continue
            logger.error(
                "request %s fails: %d of its logits are NaN after %d tokens. What it cached is dropped and its cache "
                "blocks are withheld. If this recurs the engine reports that it is not ready; check the weights, the "
                "cache dtype and the GPU",
                name,
                nans,
                request.num_computed_tokens,
            )
            if output.sampled_token_ids:
                output.sampled_token_ids[output.req_id_to_index[name]] = []
            self._isolate(scheduler, name)
            self.failures.append(self.clock())
            self.book.counts["guard", "requests"] += 1
            fail_request(scheduler, name, "the model's logits are NaN for this request; nothing of it was kept")

    def _isolate(self, scheduler: Any, name: str) -> None:
        pool = self.book.pool
        start = self.managers[0].restored_tokens(name)
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            # Pages before what the request started from are others' and were sound when they wrote them.
            written = manager.req_to_blocks[name][start // manager.block_size :]
            pool.evict_blocks({block.block_id for block in written if not block.is_null})
            own = [block for block in written if not block.is_null and block.ref_cnt == 1]
            pool.touch(own)
            self.withheld.extend(own)
            if isinstance(manager, KdaManager | LatentManager):
                manager.poison(name)
        while len(self.withheld) > QUARANTINE * pool.num_gpu_blocks:
            pool.free_blocks([self.withheld.popleft()])


def guard_of(scheduler: Any) -> Guard | None:
    """The guard of a scheduler whose KDA groups are ours, None for others."""
    guard = getattr(scheduler, "kimi_k3_guard", None)
    if guard is None:
        managers = state_managers(scheduler)
        guard = scheduler.kimi_k3_guard = Guard(managers) if managers else None
    return guard
