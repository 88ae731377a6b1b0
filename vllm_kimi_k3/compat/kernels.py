"""vLLM's compiled operations that K3 can use, with the arguments of ours.

Each has a function that says whether it takes the arguments; what it needs is read off vLLM 0.33.0's own K3. Nothing of
vLLM is imported before one is asked for.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

#: Head counts that the compiled decode kernel was built for.
_DECODE_HEADS = (12, 24, 48, 96)
#: Head counts at which vLLM's own K3 was seen to run the prefill kernel; with one head it faulted on an H200.
_PREFILL_HEADS = (6, 12)

_width_major: WeakIdKeyDictionary = WeakIdKeyDictionary()


@functools.cache
def has_fused_kda_decode(device: torch.device) -> bool:
    """0.33, CUDA: whether the decode kernel is compiled for this GPU."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("vllm") is None:
        return False
    from vllm import _custom_ops

    major, minor = torch.cuda.get_device_capability(device)
    built = (major, minor) == (9, 0) or major in (10, 12)
    return built and hasattr(_custom_ops, "fused_kda_decode") and hasattr(torch.ops._C, "fused_kda_decode")


def takes_fused_kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    pages: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> bool:
    """Whether :func:`fused_kda_decode` takes these arguments."""
    heads, dim = gate.shape[-2:]
    return (
        heads in _DECODE_HEADS
        and dim == 128
        and conv_weight.shape[1] == 4
        and windows.shape[1] == 3
        and qkv.dtype == windows.dtype == torch.bfloat16
        and states.dtype == torch.float32
        # It reads 16 bytes at once.
        and all(x.stride(0) % 8 == 0 for x in (qkv, gate, out_gate))
    )


def fused_kda_decode(
    qkv: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    out_gate: torch.Tensor,
    conv_weight: torch.Tensor,
    windows: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    pages: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda_step.reference.kda_decode_step_reference`.

    A padded row works on page 0, which holds no sequence's state, and its output is undefined.
    """
    from vllm import _custom_ops

    if conv_weight not in _width_major:
        _width_major[conv_weight] = conv_weight.view(3, -1, 4).transpose(1, 2).contiguous()
    out = torch.empty(gate.shape, dtype=qkv.dtype, device=qkv.device) if out is None else out
    _custom_ops.fused_kda_decode(
        x=qkv,
        weight=_width_major[conv_weight],
        bias=None,
        conv_state=windows.transpose(1, 2),
        raw_g=gate.unsqueeze(0),
        raw_beta=beta.unsqueeze(0),
        A_log=a_log,
        dt_bias=dt_bias,
        state_indices=pages.clamp(min=0),
        state=states,
        out=out.unsqueeze(0),
        lower_bound=lower_bound,
        output_gate=out_gate,
        norm_weight=norm_weight,
        norm_eps=eps,
    )
    return out


@functools.cache
def has_flash_kda(device: torch.device) -> bool:
    """0.33, CUDA: whether the prefill kernel is compiled for this GPU."""
    if device.type != "cuda" or torch.version.cuda is None or importlib.util.find_spec("vllm") is None:
        return False
    if importlib.util.find_spec("vllm._flashkda_C") is None:
        return False
    importlib.import_module("vllm._flashkda_C")
    return torch.cuda.get_device_capability(device)[0] in (9, 10, 12)


def takes_flash_kda(q: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether :func:`flash_kda` takes these arguments."""
    return q.dtype == torch.bfloat16 and q.shape[-1] == 128 and q.shape[-2] in _PREFILL_HEADS


def flash_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    starts: list[int],
    pages: list[int],
    fresh: list[bool],
    exports: list[tuple[int, int, int]],
) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda.reference.kda_prefill_reference`.

    A sequence is cut at its export points; the first parts of all sequences run as one batch, then the second ones.
    """
    heads, dim = q.shape[-2:]
    device = q.device
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    running: list[int | None] = [None if new else page for page, new in zip(pages, fresh, strict=True)]
    for parts in rounds(starts, pages, exports):
        rows = [slice(first, stop) for _, first, stop, _ in parts]
        given = [torch.cat([x[part] for part in rows]) if len(rows) > 1 else x[rows[0]] for x in (q, k, v, gate, beta)]
        tokens = given[0].shape[0]
        lengths = torch.tensor([0, *(part.stop - part.start for part in rows)], dtype=torch.int32)
        initial = torch.zeros(len(parts), heads, dim, dim, dtype=states.dtype, device=device)
        for index, (sequence, *_) in enumerate(parts):
            page = running[sequence]
            if page is not None:
                initial[index] = states[page]
        final = torch.empty_like(initial)
        mixed = torch.empty(1, tokens, heads, dim, dtype=v.dtype, device=device)
        space = torch.ops._flashkda_C.get_workspace_size(tokens, heads, len(parts))
        torch.ops._flashkda_C.fwd(
            *(x.contiguous().unsqueeze(0) for x in given),
            dim**-0.5,
            mixed,
            torch.empty(space, dtype=torch.uint8, device=device),
            a_log,
            dt_bias.view(heads, dim),
            lower_bound,
            initial,
            final,
            lengths.cumsum(0, dtype=torch.int32).to(device),
            None,
            None,
        )
        first = 0
        for index, (sequence, start, stop, targets) in enumerate(parts):
            out[start:stop] = mixed[0, first : first + stop - start]
            for page in targets:
                states[page] = final[index]
            running[sequence] = targets[-1]
            first += stop - start
    return out


def rounds(
    starts: list[int], pages: list[int], exports: list[tuple[int, int, int]]
) -> list[list[tuple[int, int, int, list[int]]]]:
    """Cut sequences where a state is to be kept, and put together what can run at once.

    Returns:
        rounds of (sequence, first token, token after the last, pages that get the state after it).

    >>> rounds([0, 100, 130], [5, 6], [(0, 64, 9)])
    [[(0, 0, 64, [9]), (1, 100, 130, [6])], [(0, 64, 100, [5])]]
    """
    parts: list[list[tuple[int, int, int, list[int]]]] = []
    for sequence, page in enumerate(pages):
        start, stop = starts[sequence], starts[sequence + 1]
        cuts = {start + tokens: target for owner, tokens, target in exports if owner == sequence}
        for turn, cut in enumerate(sorted({*cuts, stop})):
            if cut == start:
                continue
            while len(parts) <= turn:
                parts.append([])
            targets = [cuts[cut]] if cut in cuts else []
            parts[turn].append((sequence, start, cut, targets + [page] * (cut == stop)))
            start = cut
    return parts
