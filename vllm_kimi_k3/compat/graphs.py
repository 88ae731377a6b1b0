"""CUDA graphs: where a layer leaves a graph, and whether it can stay in one."""

from collections.abc import Callable
from typing import TypeVar

from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport

_Call = TypeVar("_Call", bound=Callable[..., None])


def leaves_graph(call: _Call) -> _Call:
    """Have a call run outside of piecewise graphs; it writes its result into a tensor that it is given.

    0.32, 0.33: vLLM turns piecewise graphs without compilation on for K3's architectures by itself. In full graphs,
    which hold decode steps, the call stays inside.
    """
    return eager_break_during_capture(call)


def decode_graphs(kernel: bool) -> AttentionCGSupport:
    """What a metadata builder answers vLLM: full graphs of decode steps where the layer runs as a kernel.

    Args:
        kernel: no operation of the layer's decode asks the device for a value.
    """
    if current_platform.is_cpu() or not kernel:
        return AttentionCGSupport.NEVER
    return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
