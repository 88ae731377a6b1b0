"""Memory beside weights and cache: activations of a step, and what lies outside torch's allocator. Estimates both.

vLLM measures these itself when it starts; the estimates are meant to be a little high, so that what ``plan`` promises
is there. ``--workspace-gib`` replaces their sum with a measured figure.
"""

from typing import Any

from vllm_kimi_k3.plan.gpus import GIB

#: Bytes outside torch's allocator: driver context, NCCL buffers, kernel workspaces, graphs. B200: 1.6 GiB of workspace
#: was seen there, beside the context; sm120: FlashKDA's first prefill takes 3.8 GiB more.
_OUTSIDE = {"cpu": int(0.5 * GIB), "sm120": 7 * GIB}
_OUTSIDE_DEFAULT = 3 * GIB
#: Tensors of the hidden width that are alive at once beside the AttnRes stream.
_HIDDEN_COPIES = 6


def activation_bytes(text: Any, tp: int, tokens: int, logit_rows: int, width: int = 2) -> int:
    """The most that a step keeps alive, for ``tokens`` tokens of which ``logit_rows`` get logits.

    The largest terms: the AttnRes stream (a sum for each block of layers, the embedding and the running sum), what a
    KDA layer projects, what the chosen experts compute before it is summed, and fp32 logits twice.
    """
    hidden, linear = text.hidden_size, text.linear_attn_config
    sources = -(-text.num_hidden_layers // text.attn_res_block_size) + 2
    stream = (sources + _HIDDEN_COPIES) * hidden
    kda = 2 * 4 * linear["num_heads"] * linear["head_dim"] // tp
    experts = text.num_experts_per_token * (3 * text.moe_intermediate_size // tp + text.routed_expert_hidden_size)
    return tokens * width * (stream + max(kda, experts)) + logit_rows * text.vocab_size * 4 * 2


def outside_bytes(architecture: str) -> int:
    """What lies outside torch's allocator on one GPU."""
    return _OUTSIDE.get(architecture, _OUTSIDE_DEFAULT)
