"""Sizes of the published Kimi K3 and of its published drafts, as their ``config.json`` files state them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

_LAYERS = 93
#: 1-based, as published: every fourth layer, and the last.
_MLA = [*range(4, _LAYERS, 4), _LAYERS]

TEXT: Any = SimpleNamespace(
    hidden_size=7168,
    intermediate_size=33792,
    num_hidden_layers=_LAYERS,
    num_attention_heads=96,
    vocab_size=163840,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=896,
    num_experts_per_token=16,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    routed_expert_hidden_size=3584,
    first_k_dense_replace=1,
    attn_res_block_size=12,
    max_position_embeddings=1 << 20,
    linear_attn_config={
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "full_attn_layers": _MLA,
        "kda_layers": [layer for layer in range(1, _LAYERS + 1) if layer not in _MLA],
    },
)

VISION: Mapping[str, Any] = {
    "vt_hidden_size": 1024,
    "qkv_hidden_size": 1536,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
    "patch_size": 14,
    "merge_kernel_size": (2, 2),
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "text_hidden_size": 7168,
}

#: Tensors that the release stores in fp32, by the end of their names. ``A_log`` and ``dt_bias`` are reported so; the
#: others follow from the total: with them it is exact, without any one of them it is not.
STORED_FP32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
#: Entries of ``A_log`` in the file; those past the 96 heads mean nothing.
STORED_A_LOG = 128


@dataclass(frozen=True)
class Draft:
    """A published DSpark draft.

    Attributes:
        name: on the Hugging Face hub.
        tokens: drafts a step that it was trained for.
        stored_bytes: of its weights, without what it shares with the target.
        mla_layers: layers that cache MLA rows like the target's.
        window_layers: layers that cache the last ``window`` tokens only.
        window: tokens of it.
        served: whether this plugin and vLLM's ``dspark`` method can run it.
    """

    name: str
    tokens: int
    stored_bytes: int
    mla_layers: int
    window_layers: int = 0
    window: int = 0
    served: bool = True


DRAFTS = {
    draft.name: draft
    for draft in (
        Draft("Inferact/Kimi-K3-DSpark", 7, 4_775_815_682, mla_layers=5),
        Draft("RedHatAI/Kimi-K3-speculator.dspark", 8, 9_489_800_962, mla_layers=0, window_layers=5, window=2048),
        Draft("RadixArk/Kimi-K3-DSpark", 7, 4_498_000_000, mla_layers=0, served=False),
    )
}
