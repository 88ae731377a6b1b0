"""Blocks, pages and padding: vLLM's figures for K3, and vLLM's own grouping."""

from typing import Any

import pytest
import torch

from vllm_kimi_k3.plan.pages import Pages, pages, row_bytes, state_bytes
from vllm_kimi_k3.plan.release import DRAFTS, TEXT

INFERACT = DRAFTS["Inferact/Kimi-K3-DSpark"]
REDHAT = DRAFTS["RedHatAI/Kimi-K3-speculator.dspark"]


@pytest.mark.parametrize(
    ("tp", "drafts", "conv", "recurrent"),
    [
        (8, 0, 27_648, 786_432),
        (8, 7, 92_160, 786_432),
        (8, 8, 101_376, 786_432),
        (16, 0, 13_824, 393_216),
        (16, 7, 46_080, 393_216),
        (16, 8, 50_688, 393_216),
    ],
)
def test_state_bytes_of_a_layer(tp: int, drafts: int, conv: int, recurrent: int) -> None:
    assert state_bytes(TEXT, tp, drafts) == (conv, recurrent)
    assert state_bytes(TEXT, tp, drafts, state_width=2) == (conv, recurrent // 2)


@pytest.mark.parametrize(
    ("tp", "drafts", "kv", "block", "page", "padding"),
    [
        (8, 0, "bf16", 768, 884_736, 8.68),
        (8, 0, "fp8", 1536, 884_736, 8.68),
        (8, 7, "bf16", 768, 884_736, 0.70),
        (8, 7, "fp8", 1536, 884_736, 0.70),
        (8, 8, "bf16", 896, 1_032_192, 16.26),
        (8, 8, "fp8", 1664, 958_464, 7.96),
        (16, 0, "bf16", 384, 442_368, 8.68),
        (16, 0, "fp8", 768, 442_368, 8.68),
        (16, 7, "bf16", 384, 442_368, 0.70),
        (16, 7, "fp8", 768, 442_368, 0.70),
        (16, 8, "bf16", 512, 589_824, 32.87),
        (16, 8, "fp8", 896, 516_096, 16.26),
    ],
)
def test_blocks_pages_and_padding(tp: int, drafts: int, kv: str, block: int, page: int, padding: float) -> None:
    [p] = pages(TEXT, tp, kv, drafts)
    assert (p.block, p.page, round(p.padding * 100, 2)) == (block, page, padding)


@pytest.mark.parametrize(("kv", "size"), [("bf16", 1152), ("fp8", 576), ("fp8_ds_mla", 656)])
def test_rows(kv: str, size: int) -> None:
    assert row_bytes(TEXT, kv) == size


def test_an_unknown_kv_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="KV dtype 'int3': expected one of bf16"):
        row_bytes(TEXT, "int3")


def test_groups_without_a_draft() -> None:
    [p] = pages(TEXT, 8)
    assert (p.mla_groups, p.kda_groups, p.group, p.absent_layers) == (1, 3, 24, 3)
    assert p.block_bytes == 20.25 * (1 << 20)
    assert p.state_block_bytes == 60.75 * (1 << 20)


def test_a_draft_of_mla_layers_makes_the_groups_larger() -> None:
    [p] = pages(TEXT, 8, drafts=7, draft=INFERACT)
    assert (p.group, p.absent_layers) == (29, 18)
    assert round(p.absent_layers / p.kda_layers * 100, 1) == 26.1


@pytest.mark.parametrize(("caching", "drafts", "running"), [(True, 0, 2), (False, 0, 1), (True, 7, 9), (False, 7, 8)])
def test_blocks_of_a_live_request(caching: bool, drafts: int, running: int) -> None:
    [p] = pages(TEXT, 8, drafts=drafts, prefix_caching=caching)
    assert p.blocks(768 * 10) == 10 + 3 * running
    assert p.blocks(768 * 10 + 1) == 11 + 3 * running


@pytest.mark.parametrize("draft", [None, INFERACT, REDHAT], ids=["no draft", "inferact", "redhat"])
@pytest.mark.parametrize("blocks", [0, 20, 35, 60, 95, 400, 5000])
def test_the_longest_context_is_the_longest_that_fits(draft: Any, blocks: int) -> None:
    [p] = pages(TEXT, 8, drafts=draft.tokens if draft else 0, draft=draft)
    longest = p.context(blocks)
    assert longest == 0 or p.blocks(longest) <= blocks
    assert p.blocks(longest + 1) > blocks


def vllm_groups(windowed: int, extra_mla: int, geometry: Pages) -> list[tuple[str, int]]:
    """What vLLM's own grouping makes of a model with these layers: kind and layers of each group."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    mla = MLAAttentionSpec(block_size=geometry.block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    kda = MambaSpec(
        shapes=((geometry.state // 2,),),
        dtypes=(torch.bfloat16,),
        block_size=geometry.block,
        page_size_padded=geometry.page,
    )
    window = SlidingWindowSpec(
        block_size=geometry.block, num_kv_heads=1, head_size=288, dtype=torch.bfloat16, sliding_window=2048
    )
    layers: dict[str, Any] = {}
    for layer in range(93):
        layers[f"model.{layer}"] = kda if layer + 1 in TEXT.linear_attn_config["kda_layers"] else mla
    layers |= {f"draft.{layer}": mla for layer in range(extra_mla)}
    layers |= {f"draft.w{layer}": window for layer in range(windowed)}
    groups = kv_cache_utils._get_kv_cache_groups_uniform_page_size(layers)
    return [(type(group.kv_cache_spec).__name__, len(group.layer_names)) for group in groups]


@pytest.mark.parametrize("draft", [None, INFERACT, REDHAT], ids=["no draft", "inferact", "redhat"])
def test_groups_are_those_of_vllm(draft: Any) -> None:
    [p] = pages(TEXT, 8, drafts=7 if draft else 0, draft=draft)
    groups = vllm_groups(draft.window_layers if draft else 0, draft.mla_layers if draft else 0, p)
    count = [sum(kind == name for kind, _ in groups) for name in ("MLAAttentionSpec", "MambaSpec", "SlidingWindowSpec")]
    assert count == [p.mla_groups, p.kda_groups, p.window_groups]
    assert max(size for _, size in groups) == p.group
