"""K3's cache at TP8 with bf16 rows: the layers' specs and their groups, as this plugin and as vLLM's own K3 have them.

Both come to one group of 24 MLA layers and three of 23 KDA layers, so a block of either pool has the same bytes:
24 pages of 884,736 bytes.
"""

import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec, MambaSpec, MLAAttentionSpec

from vllm_kimi_k3.cache.grouping import groups_of
from vllm_kimi_k3.cache.spec import KdaStateSpec, LatentRowSpec

#: Tokens of an MLA page, and of the hash unit: vLLM's ``--prefix-match-unit 128``, this plugin's default.
PAGE, UNIT = 768, 128
#: Bytes of a block on one rank.
BLOCK_BYTES = 24 * 884_736
_LAYERS = 93
_STATE = {"shapes": ((3, 4608), (12, 128, 128)), "dtypes": (torch.bfloat16, torch.float32), "mamba_cache_mode": "align"}


def specs(unit: int = UNIT, drafts: int = 0) -> dict[str, KVCacheSpec]:
    """This plugin's specs of K3's layers on one of eight ranks, by name: 24 MLA, 69 KDA, and so many draft layers."""
    rows = LatentRowSpec(block_size=PAGE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    states = KdaStateSpec(block_size=unit, page_size_padded=rows.page_size_bytes, **_STATE)
    layers: dict[str, KVCacheSpec] = {
        f"model.layers.{index}": rows if _is_mla(index) else states for index in range(_LAYERS)
    }
    return layers | {f"draft.layers.{index}": rows for index in range(drafts)}


def our_groups(unit: int = UNIT) -> list[KVCacheGroupSpec]:
    """This plugin's cache groups."""
    return groups_of(specs(unit))


def vllm_groups() -> list[KVCacheGroupSpec]:
    """The cache groups of vLLM's own K3 with FlashKDA, whose prefill leaves one state on the way."""
    rows = MLAAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    states = MambaSpec(
        block_size=PAGE,
        page_size_padded=rows.page_size_bytes,
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=16,
        **_STATE,
    )
    names = [f"model.layers.{index}" for index in range(_LAYERS)]
    kda = [name for index, name in enumerate(names) if not _is_mla(index)]
    mla = [name for index, name in enumerate(names) if _is_mla(index)]
    return [KVCacheGroupSpec(mla, rows), *(KVCacheGroupSpec(kda[first::3], states) for first in range(3))]


def _is_mla(layer: int) -> bool:
    return layer % 4 == 3 or layer == _LAYERS - 1
