"""Which of vLLM's serving objects serve K3."""

from typing import Any


def serves_k3(serving: Any) -> bool:
    """Whether one of vLLM's serving objects parses with our parser."""
    from vllm_kimi_k3.chat.vllm_parsers import KimiK3Parser

    parser = getattr(serving, "parser_cls", None)
    return parser is not None and issubclass(parser, KimiK3Parser)
