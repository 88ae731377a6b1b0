"""The walk over the states of a chunked KDA prefill as one kernel: a program a sequence, head and slice of values.

Rows of a state do not see each other, so a head's state is cut into slices of value rows that are walked side by side;
a slice lies in registers from the first chunk of its sequence to the last.
"""

import torch
import triton
import triton.language as tl

from vllm_kimi_k3.ops.kda.chunk import CHUNK, Chunks, prefill

#: Value rows of a slice, the least that the matrix units take.
_SLICE = 16


@triton.jit
def _walk(
    own,
    carried,
    queries,
    attend,
    keys,
    total,
    out,
    states,
    first,
    count,
    page,
    fresh,
    order,
    export,
    state_page,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    SLICE: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(first + sequence)
    steps = tl.load(count + sequence)
    if steps == 0:
        return
    row = tl.arange(0, C)
    key = tl.arange(0, D)
    value = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    place = (head * D + value[:, None]) * D + key[None, :]
    home = states + tl.load(page + sequence).to(tl.int64) * state_page
    # The page of a fresh sequence may hold anything.
    old = tl.load(fresh + sequence + 0 * key) == 0
    state = tl.where(old[None, :], tl.load(home + place).to(tl.float32), 0.0)
    by_key = row[:, None] * D + key[None, :]
    by_value = row[:, None] * D + value[None, :]
    by_row = row[:, None] * C + row[None, :]
    for step in range(begin, begin + steps):
        chunk = tl.load(order + step).to(tl.int64) * HEADS + head
        before = tl.trans(state)
        delta = tl.load(own + chunk * C * D + by_value)
        delta -= tl.dot(tl.load(carried + chunk * C * D + by_key), before, input_precision="ieee")
        mixed = tl.dot(tl.load(queries + chunk * C * D + by_key), before, input_precision="ieee")
        mixed = tl.dot(tl.load(attend + chunk * C * C + by_row), delta, mixed, input_precision="ieee")
        tl.store(out + chunk * C * D + by_value, mixed)
        decayed = state * tl.load(total + chunk * D + key)[None, :]
        state = tl.dot(tl.trans(delta), tl.load(keys + chunk * C * D + by_key), decayed, input_precision="ieee")
        target = tl.load(export + step).to(tl.int64)
        if target >= 0:
            tl.store(states + target * state_page + place, state.to(states.dtype.element_ty))
    tl.store(home + place, state.to(states.dtype.element_ty))


def walk(chunks: Chunks, states: torch.Tensor, pages: list[int], fresh: list[bool]) -> torch.Tensor:
    """As :func:`~vllm_kimi_k3.ops.kda.chunk.walk_reference`."""
    _, heads, _, dim = chunks.own.shape
    counts = [len(steps) for steps in chunks.plan]
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    steps = [step for sequence in chunks.plan for step in sequence]
    rows = [firsts, counts, pages, [int(new) for new in fresh]]
    sequence = torch.tensor(rows, dtype=torch.int32, device=states.device)
    order = torch.tensor(
        [[chunk for chunk, _ in steps], [-1 if page is None else page for _, page in steps]],
        dtype=torch.int32,
        device=states.device,
    )
    out = torch.empty_like(chunks.own)
    # Slicing and transposing have left some of these as views.
    tensors = (chunks.own, chunks.carried, chunks.queries, chunks.attend, chunks.keys, chunks.total)
    _walk[(len(counts), heads, dim // _SLICE)](
        *(tensor.contiguous() for tensor in tensors),
        out,
        states,
        *sequence.unbind(0),
        *order.unbind(0),
        states.stride(0),
        HEADS=heads,
        D=dim,
        C=CHUNK,
        SLICE=_SLICE,
        num_warps=4,
        num_stages=2,
    )
    return out


def kda_prefill(
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
    """As :func:`~vllm_kimi_k3.ops.kda.reference.kda_prefill_reference`."""
    where = (states, starts, pages, fresh, exports)
    return prefill(walk, q, k, v, gate, beta, a_log, dt_bias, lower_bound, *where)
