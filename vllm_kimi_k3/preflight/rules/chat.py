"""Chat protocol: parsers, template, tokenizer."""

from collections.abc import Iterator

from vllm_kimi_k3.preflight.arguments import suggestion
from vllm_kimi_k3.preflight.facts import Facts, context_length
from vllm_kimi_k3.preflight.finding import Finding, error, warning

_PARSER = "kimi_k3"


def check(facts: Facts) -> Iterator[Finding]:
    """Findings about the chat protocol and the request limits."""
    serving = facts.serving
    limit = facts.text.max_position_embeddings
    try:
        length = context_length(serving.get("max_model_len"), limit)
    except ValueError as problem:
        yield error("max-model-len", str(problem), "vLLM does not start", f"a number up to {limit}, or auto")
    else:
        if length > limit:
            yield error(
                "max-model-len",
                f"--max-model-len {length}",
                f"the model was made for {limit} tokens at most",
                f"--max-model-len {limit}",
            )
    for name in serving.unknown:
        close = suggestion(name)
        yield error(
            "unknown-option",
            f"--{name}",
            "vLLM 0.32 and 0.33 have no such option",
            f"--{close}" if close else "leave it out",
        )
    tokenizer = serving.get("tokenizer_mode")
    if tokenizer not in (None, "auto", _PARSER):
        yield error(
            "tokenizer-mode",
            f"--tokenizer-mode {tokenizer}",
            "K3's vocabulary is a tiktoken file that only its own mode reads",
            "leave it out",
        )
    if serving.frontend:
        yield from _frontend(facts)


def _frontend(facts: Facts) -> Iterator[Finding]:
    serving = facts.serving
    for option, loses in (("tool_call_parser", "tool calls come"), ("reasoning_parser", "thinking comes")):
        parser, flag = serving.get(option), option.replace("_", "-")
        if parser is None:
            yield warning(
                f"{flag}-missing",
                f"--{flag} is not given",
                f"{loses} back as raw markup in the answer",
                f"--{flag} {_PARSER}",
            )
        elif parser != _PARSER:
            yield error(flag, f"--{flag} {parser}", "it reads another model's markup", f"--{flag} {_PARSER}")
    if serving.get("tool_call_parser") and not serving.get("enable_auto_tool_choice", False):
        yield warning(
            "auto-tool-choice",
            "--enable-auto-tool-choice is not given",
            "requests with tools and without tool_choice are refused",
            "--enable-auto-tool-choice",
        )
    if serving.get("chat_template"):
        yield error(
            "chat-template",
            f"--chat-template {serving.get('chat_template')}",
            "K3 has no Jinja template; ids are built segment by segment, so that no text becomes a control token",
            "leave it out",
        )
    if serving.get("trust_remote_code", False):
        yield warning(
            "trust-remote-code",
            "--trust-remote-code",
            "it runs Python from the checkpoint, and nothing of K3 needs that here",
            "leave it out",
        )
