"""Kimi K3 for vLLM, as a plugin.

vLLM calls :func:`register` through the ``vllm.general_plugins`` entry point in every process that it starts. The
tables below list everything that the plugin puts into vLLM's registries; entries are ``"module:name"`` strings, so
nothing heavy is imported until vLLM asks for it.
"""

import logging

__version__ = "0.1.0"

ROOT = "vllm_kimi_k3"

#: architecture name in config.json -> model class
MODELS = {
    "KimiK3ForConditionalGeneration": f"{ROOT}.model.k3:KimiK3ForConditionalGeneration",
    "KimiLinearForCausalLM": f"{ROOT}.model.k3:KimiLinearForCausalLM",
}

#: model_type in config.json -> Hugging Face config class
CONFIGS = {
    "kimi_k3": f"{ROOT}.config:KimiK3Config",
    "kimi_linear": f"{ROOT}.config:KimiLinearConfig",
}

#: tokenizer and renderer mode of K3, vLLM's own name for it
CHAT_MODE = "kimi_k3"
TOKENIZER = f"{ROOT}.chat.vllm_tokenizer:KimiK3Tokenizer"
RENDERER = f"{ROOT}.chat.vllm_renderer:KimiK3Renderer"

#: our parsers, under the same name
PARSER = f"{ROOT}.chat.vllm_parsers:KimiK3Parser"
REASONING_PARSER = f"{ROOT}.chat.vllm_parsers:KimiK3ReasoningParser"
TOOL_PARSER = f"{ROOT}.chat.vllm_parsers:KimiK3ToolParser"

logger = logging.getLogger(f"vllm.{ROOT}")
_done = False


def register() -> None:
    """Put the plugin into vLLM's registries; safe to call in every process and more than once.

    Does nothing when ``VLLM_KIMI_K3_DISABLE=1`` is set, and on a vLLM outside the supported range only warns, naming
    the range: vLLM then goes on with what it ships itself.
    """
    global _done
    if _done:
        return
    _done = True

    from vllm_kimi_k3.compat import engine, parsers, processes, version
    from vllm_kimi_k3.settings import settings

    if settings().disable:
        logger.info("vllm-kimi-k3 %s is switched off by VLLM_KIMI_K3_DISABLE", __version__)
        return
    problem = version.version_problem()
    if problem:
        logger.warning("vllm-kimi-k3 %s is not active: %s", __version__, problem)
        return
    if settings().own_model:
        engine.register_models(MODELS)
        engine.register_configs(CONFIGS)
        engine.register_config_hooks(tuple(MODELS))
    processes.patch_executor(MODELS)
    parsers.register_chat(CHAT_MODE, TOKENIZER, RENDERER)
    parsers.register_parsers(CHAT_MODE, PARSER, REASONING_PARSER, TOOL_PARSER)
    source = ", ".join(MODELS) if settings().own_model else "vLLM's own (VLLM_KIMI_K3_MODEL=vllm)"
    logger.info("vllm-kimi-k3 %s registered: models %s", __version__, source)
