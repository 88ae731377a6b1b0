"""Patches of vLLM's Anthropic Messages."""

from collections.abc import Callable
from typing import Any

from vllm_kimi_k3.compat.patch import wrap
from vllm_kimi_k3.compat.serving import serves_k3


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

    wrap(Messages, "to_chat_completion_request", ("cls", "anthropic_request"), make_request)
    wrap(Messages, "_convert_tool_use_block", ("cls", "block", "tool_calls"), make_call)
    wrap(Messages, "_should_merge_inline_system", ("cls", "online_renderer"), make_merge)


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

    wrap(AnthropicServingMessages, "messages_full_converter", ("self", "generator"), make)
