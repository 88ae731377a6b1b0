"""Short causal convolution over packed sequences as one kernel: a program a tile of tokens and channels."""

import itertools

import torch
import triton
import triton.language as tl

_TOKENS, _CHANNELS = 16, 128


@triton.jit
def _conv(
    x,
    weight,
    windows,
    out,
    sequence_of,
    begin,
    page,
    fresh,
    x_token,
    window_page,
    window_row,
    window_channel,
    tokens,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = token < tokens
    inside = channel < CHANNELS
    sequence = tl.load(sequence_of + token, mask=real, other=0)
    start = tl.load(begin + sequence)
    old = tl.load(fresh + sequence) == 0
    window = windows + tl.load(page + sequence).to(tl.int64) * window_page
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        here = real & (token - back >= start)
        at = x + (token - back).to(tl.int64)[:, None] * x_token + channel[None, :]
        value = tl.load(at, mask=here[:, None] & inside[None, :], other=0.0)
        # Row r of a window is the input TAPS - 1 - r tokens before the sequence's first one.
        row = token - start - back + TAPS - 1
        before = real & old & (token - back < start)
        at = window[:, None] + row[:, None] * window_row + channel[None, :] * window_channel
        kept = tl.load(at, mask=before[:, None] & inside[None, :], other=0.0).to(value.dtype)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(here[:, None], value, kept).to(tl.float32) * factor[None, :]
    total = total / (1.0 + tl.exp(-total))
    at = out + token.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


def short_conv_prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    starts: list[int],
    pages: list[int],
    fresh: list[bool],
    exports: list[tuple[int, int, int]],
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.short_conv.reference.short_conv_prefill_reference`."""
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    lengths = [stop - start for start, stop in itertools.pairwise(starts)]
    rows = torch.tensor([starts[:-1], pages, [int(new) for new in fresh], lengths], dtype=torch.int32, device=x.device)
    begin, page, new, length = rows.unbind(0)
    sequence_of = torch.repeat_interleave(torch.arange(len(pages), device=x.device), length, output_size=tokens)
    _conv[(triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, _CHANNELS))](
        x,
        weight,
        windows,
        out,
        sequence_of,
        begin,
        page,
        new,
        x.stride(0),
        windows.stride(0),
        windows.stride(1),
        windows.stride(2),
        tokens,
        CHANNELS=channels,
        TAPS=weight.shape[1],
        BLOCK_T=_TOKENS,
        BLOCK_C=_CHANNELS,
        num_warps=4,
    )
    keep_windows(x, windows, weight.shape[1] - 1, starts, pages, fresh, exports)
    return out


def keep_windows(
    x: torch.Tensor,
    windows: torch.Tensor,
    reach: int,
    starts: list[int],
    pages: list[int],
    fresh: list[bool],
    exports: list[tuple[int, int, int]],
) -> None:
    """Leave the last ``reach`` inputs of each sequence in its page, and those at the export points in theirs."""
    for index, page in enumerate(pages):
        tokens = x[starts[index] : starts[index + 1]]
        if not len(tokens):
            continue
        before = torch.zeros_like(windows[page, :reach]) if fresh[index] else windows[page, :reach].clone()
        targets = [(count, target) for sequence, count, target in exports if sequence == index]
        for count, target in [*targets, (len(tokens), page)]:
            newest = tokens[max(count - reach, 0) : count].to(windows.dtype)
            windows[target, :reach] = torch.cat([before[count:], newest])
