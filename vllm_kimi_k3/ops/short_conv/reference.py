"""Short causal convolution in plain torch."""

import torch
import torch.nn.functional as F


def short_conv_prefill_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    windows: torch.Tensor,
    starts: list[int],
    pages: list[int],
    fresh: list[bool],
    exports: list[tuple[int, int, int]],
) -> torch.Tensor:
    """SiLU of a depthwise causal convolution over packed sequences, in fp32; windows updated in place.

    Args:
        x: [T, C], the raw inputs.
        weight: [C, K], the newest input last.
        windows: [P, W, C] with W >= K - 1: the raw inputs before a sequence's next token lie in rows 0 to K - 2 of
            its page, oldest first.
        starts: N + 1 offsets of the sequences in T.
        pages: N pages; read before, written after.
        fresh: N flags; a fresh sequence has zeros before it whatever its page holds.
        exports: (sequence, tokens, page): also leave the window after that many tokens of the sequence in that page.

    Returns:
        [T, C] in x's dtype.
    """
    reach = weight.shape[1] - 1
    out = torch.empty_like(x)
    kernel = weight.float().unsqueeze(1)
    for index, page in enumerate(pages):
        tokens = slice(starts[index], starts[index + 1])
        if tokens.stop == tokens.start:
            continue
        before = torch.zeros_like(windows[page, :reach]) if fresh[index] else windows[page, :reach]
        inputs = torch.cat([before.to(x.dtype), x[tokens]])
        y = F.conv1d(inputs.float().t().unsqueeze(0), kernel, groups=weight.shape[0])
        out[tokens] = F.silu(y.squeeze(0).t()).to(x.dtype)
        for sequence, count, target in exports:
            if sequence == index:
                windows[target, :reach] = inputs[count : count + reach].to(windows.dtype)
        windows[page, :reach] = inputs[-reach:].to(windows.dtype)
    return out


def short_conv_decode_reference(
    x: torch.Tensor, weight: torch.Tensor, windows: torch.Tensor, pages: torch.Tensor
) -> torch.Tensor:
    """One token of each of N sequences; otherwise as :func:`short_conv_prefill_reference`.

    Args:
        x: [N, C].
        weight: [C, K].
        windows: [P, W, C], updated in place.
        pages: [N] int64.

    Returns:
        [N, C] in x's dtype.
    """
    reach = weight.shape[1] - 1
    inputs = torch.cat([windows[pages, :reach].to(x.dtype), x.unsqueeze(1)], dim=1)
    y = torch.einsum("nkc,ck->nc", inputs.float(), weight.float())
    windows[pages, :reach] = inputs[:, 1:].to(windows.dtype)
    return F.silu(y).to(x.dtype)
