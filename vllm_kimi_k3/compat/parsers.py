"""The registries of tokenizers, renderers and parsers, and patches where vLLM has none."""

from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.compat.patch import wrap
from vllm_kimi_k3.compat.version import load


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

    wrap(ParserManager, "_compose_parser", ("cls", "tool_parser_name", "reasoning_parser_name"), make)


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

    wrap(XgrammarBackend, "__post_init__", ("self",), make)
