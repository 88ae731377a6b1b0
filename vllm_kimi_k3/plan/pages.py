"""Blocks, pages and padding of the hybrid cache, as vLLM makes them for a model with KDA and MLA layers.

vLLM wants pages of one size: a page of MLA rows grows until it holds a KDA state, and the state's page is padded to it.
Layers of a kind are then put into groups of equal size, padded with layers that do not exist; a block id stands for a
page in every layer of a group. Figures for the release are in ``docs/operations.md``.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from vllm_kimi_k3.plan.release import Draft

#: vLLM rounds the tokens of a block to this for models with MLA layers on a GPU, and takes it as the block size on CPU.
BLOCK_MULTIPLE = 128

#: Bytes of a cached value by ``--kv-cache-dtype``. The layout ``fp8_ds_mla`` has rows of its own: 656 bytes.
ROW_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def row_bytes(text: Any, kv_dtype: str) -> int:
    """Bytes of one token's MLA row in one layer; every rank of a tensor-parallel group has all of it.

    Raises:
        ValueError: the dtype is not known.
    """
    width = text.kv_lora_rank + text.qk_rope_head_dim
    if kv_dtype == "fp8_ds_mla":
        # 512 fp8 values with four fp32 scales, and the 64 of the shared key in bf16.
        return text.kv_lora_rank + 4 * (text.kv_lora_rank // 128) + 2 * text.qk_rope_head_dim
    if kv_dtype not in ROW_BYTES:
        raise ValueError(f"KV dtype {kv_dtype!r}: expected one of {', '.join([*ROW_BYTES, 'fp8_ds_mla'])}")
    return width * ROW_BYTES[kv_dtype]


def state_bytes(text: Any, tp: int, drafts: int, conv_width: int = 2, state_width: int = 4) -> tuple[int, int]:
    """Bytes of one KDA layer's state on one rank: conv window and recurrent state.

    Args:
        text: the text config.
        tp: tensor-parallel size.
        drafts: tokens that a speculator drafts; the window holds so many rows more.
        conv_width, state_width: bytes of a value of each.
    """
    linear = text.linear_attn_config
    heads, dim = linear["num_heads"] // tp, linear["head_dim"]
    rows = linear["short_conv_kernel_size"] - 1 + drafts
    return rows * 3 * heads * dim * conv_width, heads * dim * dim * state_width


@dataclass(frozen=True)
class Pages:
    """The cache's geometry on one rank of one pipeline stage.

    Attributes:
        block: tokens of a block of MLA rows.
        page: bytes of a page in one layer.
        state: bytes of a KDA state in one layer, before it is padded to ``page``.
        row: bytes of an MLA row in one layer.
        mla_layers, kda_layers: of this stage, the draft's MLA layers among the former.
        mla_groups, kda_groups, window_groups: groups of the whole model; the last are the draft's layers that see a
            window only.
        group: layers of a group on this stage, absent ones included.
        running: blocks that a live request has in each KDA group.
        window: blocks that it has at most in each window group.
    """

    block: int
    page: int
    state: int
    row: int
    mla_layers: int
    kda_layers: int
    mla_groups: int
    kda_groups: int
    window_groups: int
    group: int
    running: int
    window: int

    @property
    def padding(self) -> float:
        """Share of a KDA state that its page adds to it."""
        return self.page / self.state - 1 if self.kda_layers else 0.0

    @property
    def absent_layers(self) -> int:
        """KDA layers that do not exist but take memory."""
        return max(self.kda_groups * self.group - self.kda_layers, 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block id: a page in every layer of a group."""
        return self.group * self.page

    @property
    def state_block_bytes(self) -> int:
        """Bytes of one kept state of a whole request: a block id in every KDA group."""
        return self.kda_groups * self.block_bytes

    def blocks(self, context: int) -> int:
        """Block ids that a live request of so many tokens holds."""
        rows = ceil(context / self.block)
        fixed = self.kda_groups * self.running
        return self.mla_groups * rows + self.window_groups * min(rows, self.window) + fixed

    def context(self, blocks: int) -> int:
        """Tokens of the longest request that so many block ids hold; 0 if they hold none."""
        left = blocks - self.kda_groups * self.running
        if not self.mla_groups or left <= 0:
            return 0
        both = self.mla_groups + self.window_groups
        if left <= both * self.window:
            return left // both * self.block
        return (left - self.window_groups * self.window) // self.mla_groups * self.block


def pages(
    text: Any,
    tp: int = 1,
    kv_dtype: str = "bf16",
    drafts: int = 0,
    draft: Draft | None = None,
    stages: list[range] | None = None,
    prefix_caching: bool = True,
    width: int = 2,
    state_width: int = 4,
) -> list[Pages]:
    """The geometry of each pipeline stage.

    Args:
        text: the text config.
        tp: tensor-parallel size.
        kv_dtype: "bf16", "fp8", ….
        drafts: tokens that a speculator drafts.
        draft: whose layers the last stage runs.
        stages: layers of each pipeline stage; one stage if None.
        prefix_caching: whether states are kept; a live request then has one block more in each KDA group.
        width: bytes of a value of the model's dtype, which the conv window has too.
        state_width: bytes of a value of the recurrent state, 4 or 2.
    """
    row = row_bytes(text, kv_dtype)
    state = sum(state_bytes(text, tp, drafts, width, state_width))
    block = BLOCK_MULTIPLE * ceil(state / (BLOCK_MULTIPLE * row))
    stages = stages or [range(text.num_hidden_layers)]
    kda = {layer - 1 for layer in text.linear_attn_config["kda_layers"]}
    rows_of_draft = draft.mla_layers if draft else 0
    windowed = draft.window_layers if draft else 0
    counts = (text.num_hidden_layers - len(kda) + rows_of_draft, len(kda), windowed)
    groups = _groups(counts)
    result = []
    for index, stage in enumerate(stages):
        kda_here = sum(layer in kda for layer in stage)
        drafting = index == len(stages) - 1
        mla_here = len(stage) - kda_here + rows_of_draft * drafting
        here = (mla_here, kda_here, windowed * drafting)
        result.append(
            Pages(
                block=block,
                page=block * row,
                state=state,
                row=row,
                mla_layers=mla_here,
                kda_layers=kda_here,
                mla_groups=groups[0],
                kda_groups=groups[1],
                window_groups=groups[2],
                group=max(ceil(count / number) for count, number in zip(here, groups, strict=True) if number),
                running=1 + drafts + prefix_caching,
                window=ceil(draft.window / block) + 1 if draft else 0,
            )
        )
    return result


def _groups(counts: tuple[int, int, int]) -> tuple[int, int, int]:
    """How many groups each kind of layer makes; a group has as many layers as the rarest kind, or as the commonest if
    that has few more."""
    present = [count for count in counts if count]
    size = max(present) if max(present) < 1.5 * min(present) else min(present)
    mla, kda, window = (ceil(count / size) for count in counts)
    return mla, kda, window
