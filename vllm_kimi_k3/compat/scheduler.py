"""Patches of vLLM's scheduler, and how it is told to fail a request."""

from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.compat.patch import wrap

#: The name under which an engine core is asked for its cache's numbers.
VIEW = "kimi_k3_cache"


def patch_scheduler() -> None:
    """0.32, 0.33: let our cache say where a prompt's step ends. There is no registry for this.

    vLLM cuts a prompt's step where a state must land, at pages and again at the prompt's last hash block; ours is given
    out from inside a step. Schedulers whose KDA groups are not ours are left as they are.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., int]) -> Callable[..., int]:
        def _mamba_block_aligned_split(
            self: Any,
            request: Any,
            num_new_tokens: int,
            num_new_local_computed_tokens: int = 0,
            num_external_computed_tokens: int = 0,
        ) -> int:
            from vllm_kimi_k3.cache.schedule import state_managers, step_tokens

            managers = state_managers(self)
            arguments = (request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)
            return step_tokens(self, managers, *arguments) if managers else original(self, *arguments)

        return _mamba_block_aligned_split

    known = ("self", "request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens")
    wrap(Scheduler, "_mamba_block_aligned_split", known, make)


def fail_request(scheduler: Any, name: str, message: str) -> None:
    """Have the scheduler fail a request at the end of the update that is going on.

    0.32 collects the ids of such requests, 0.33 also what their clients are told.
    """
    failing = scheduler.grammar_compile_error_reqs
    if isinstance(failing, set):
        failing.add(name)
        return
    from vllm.outputs import RequestError

    failing[name] = RequestError(code="nan_logits", message=message)


def patch_output() -> None:
    """0.32, 0.33: let our cache see a step's output before vLLM does, in schedulers whose KDA groups are ours."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            from vllm_kimi_k3.cache.guard import guard_of

            guard = guard_of(self)
            if guard is not None:
                guard.inspect(self, model_runner_output)
            return original(self, scheduler_output, model_runner_output)

        return update_from_output

    wrap(Scheduler, "update_from_output", ("self", "scheduler_output", "model_runner_output"), make)


def add_cache_view() -> None:
    """0.32, 0.33: an engine core can be asked for its cache's numbers, as for anything by a utility's name.

    Raises:
        RuntimeError: vLLM has something of that name itself.
    """
    from vllm.v1.engine.core import EngineCore

    def kimi_k3_cache(self: Any) -> Any:
        from vllm_kimi_k3.cache.view import view

        return view(self.scheduler)

    if getattr(EngineCore, VIEW, kimi_k3_cache).__module__ != __name__:
        raise RuntimeError(f"EngineCore.{VIEW} is vLLM's own")
    setattr(EngineCore, VIEW, kimi_k3_cache)
