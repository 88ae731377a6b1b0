"""The rotation as one kernel: a patch's angles are read once for all its heads."""

import torch
import triton
import triton.language as tl

#: Patches of a program: few, so that a small image still fills the chip.
_ROWS = 4


# The number of patches differs with every batch and decides nothing.
@triton.jit(do_not_specialize=["count"])
def _rotary(qkv, cos, sin, count, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    pair = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (pair < HALF)[None, :]
    angle = row[:, None] * HALF + pair[None, :]
    c = tl.load(cos + angle, mask=inside)
    s = tl.load(sin + angle, mask=inside)
    member = tl.arange(0, 2)
    both = inside[:, :, None] & (member >= 0)[None, None, :]
    place = row[:, None, None] * (3 * HEADS * 2 * HALF) + 2 * pair[None, :, None] + member[None, None, :]
    place += tl.program_id(1) * (HEADS * 2 * HALF)
    for head in range(HEADS):
        at = qkv + place + head * 2 * HALF
        first, second = tl.split(tl.load(at, mask=both).to(tl.float32))
        turned = tl.join(first * c - second * s, first * s + second * c)
        tl.store(at, turned.to(qkv.dtype.element_ty), mask=both)


def rotary(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """As :func:`~vllm_kimi_k3.ops.rotary.reference.rotary_reference`; all three contiguous."""
    count, _, heads, dim = qkv.shape
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
    if count:
        _rotary[(triton.cdiv(count, _ROWS), 2)](
            qkv,
            cos,
            sin,
            count,
            HEADS=heads,
            HALF=dim // 2,
            ROWS=_ROWS,
            BLOCK=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )
