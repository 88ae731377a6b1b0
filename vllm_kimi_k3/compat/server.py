"""Patches of vLLM's API server, made when it serves K3."""

import sys
from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.compat.messages import patch_anthropic, patch_anthropic_arguments
from vllm_kimi_k3.compat.patch import wrap
from vllm_kimi_k3.compat.processes import patch_exit_code
from vllm_kimi_k3.compat.scheduler import VIEW
from vllm_kimi_k3.compat.serving import serves_k3

#: Of the paths that this plugin serves.
PREFIX = "/k3"


def patch_chat_server() -> None:
    """Patch the API server that this process runs, if it runs one; the K3 renderer calls this when it is made."""
    if "vllm.entrypoints.launchers.app" not in sys.modules:
        return
    from vllm_kimi_k3.settings import settings

    patch_exit_code()
    patch_middleware()
    patch_guarded_paths()
    patch_chat_params()
    patch_anthropic()
    if settings().moonshot_token_count:
        patch_usage()
    patch_anthropic_arguments()
    patch_finish_reason()


def patch_middleware() -> None:
    """0.32, 0.33: the server's application gets our middleware, inside vLLM's own; its plugins cannot add one."""
    from vllm.entrypoints.launchers import app

    from vllm_kimi_k3.cache.status import CacheStatus
    from vllm_kimi_k3.chat.scope import ScopeMiddleware

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def init_entrypoints_middleware(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
            app.add_middleware(ScopeMiddleware)
            app.add_middleware(CacheStatus, ask=ask_engines)
            init(args, app, *rest, **kwargs)

        return init_entrypoints_middleware

    wrap(app, "init_entrypoints_middleware", ("args", "app"), make)


def patch_guarded_paths() -> None:
    """0.32, 0.33: where the server has an API key, our paths ask for it as /v1 does. vLLM has one tuple of prefixes.

    Raises:
        RuntimeError: it has no such tuple.
    """
    from vllm.entrypoints.serve.middleware import authenticate

    guarded = getattr(authenticate, "GUARDED_PREFIX", None)
    if not isinstance(guarded, tuple):
        raise RuntimeError(f"cannot guard {PREFIX}: authenticate.GUARDED_PREFIX is {guarded!r}, expected a tuple")
    if PREFIX not in guarded:
        authenticate.GUARDED_PREFIX = (*guarded, PREFIX)


async def ask_engines(app: Any) -> tuple[str, dict[int, dict[str, Any]]] | None:
    """The views of all engine cores that this server knows, by data-parallel rank; None without our cache."""
    engine = getattr(app.state, "engine_client", None)
    if engine is None or not engine.vllm_config.cache_config.enable_prefix_caching:
        return None
    core = engine.engine_core
    views = await core.call_utility_all_async(VIEW)
    by_rank = zip(core.engine_ranks_managed, views, strict=True)
    found = {rank: view for rank, view in by_rank if view is not None}
    return engine.vllm_config.model_config.served_model_name, found


def patch_chat_params() -> None:
    """0.32, 0.33: a renderer's parameters carry the request's `thinking` object, null effort and `text.format`."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest

    from vllm_kimi_k3.chat.vllm_request import carry_fields

    def make(build: Callable[..., Any]) -> Callable[..., Any]:
        def build_chat_params(self: Any, *args: Any, **kwargs: Any) -> Any:
            return carry_fields(self, build(self, *args, **kwargs))

        return build_chat_params

    for request in (ChatCompletionRequest, ResponsesRequest, TokenizeChatRequest):
        wrap(request, "build_chat_params", ("self", "default_template"), make)


def patch_usage() -> None:
    """0.32, 0.33: usage counts prompt tokens as Moonshot's service does; Messages takes its numbers from Chat's."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.responses import serving as responses

    from vllm_kimi_k3.chat.vllm_request import moonshot_count

    wrap(chat, "UsageInfo", ("prompt_tokens",), lambda usage: moonshot_count(usage, "prompt_tokens"))
    wrap(responses, "ResponseUsage", ("input_tokens",), lambda usage: moonshot_count(usage, "input_tokens"))


def patch_finish_reason() -> None:
    """0.32: a whole answer that ran into the token limit says `length` also where it has calls; 0.33 does so itself."""
    import vllm
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat

    if not vllm.__version__.startswith("0.32."):
        return

    def make(generate: Any) -> Any:
        async def chat_completion_full_generator(
            self: Any, request: Any, result_generator: Any, *args: Any, **kwargs: Any
        ) -> Any:
            outputs: list[Any] = []

            async def watched() -> Any:
                async for result in result_generator:
                    outputs[:] = result.outputs
                    yield result

            response = await generate(self, request, watched(), *args, **kwargs)
            if serves_k3(self):
                reasons = {output.index: output.finish_reason for output in outputs}
                for choice in getattr(response, "choices", ()):
                    if choice.finish_reason == "tool_calls" and (
                        reasons[choice.index] == "length" or not choice.message.tool_calls
                    ):
                        choice.finish_reason = reasons[choice.index]
            return response

        return chat_completion_full_generator

    wrap(OpenAIServingChat, "chat_completion_full_generator", ("self", "request", "result_generator"), make)
