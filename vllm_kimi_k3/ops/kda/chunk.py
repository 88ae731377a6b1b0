"""KDA in chunks, in plain torch: the same recurrence as matrix products.

Inside a chunk that starts from state S0, with G_t the log-decay summed up to and including token t:

    u_t = beta_t (v_t - S0 (k_t e^{G_t}) - sum_{j<t} u_j (k_j e^{G_t - G_j}) . k_t)
    o_t = S0 (q_t e^{G_t}) + sum_{j<=t} u_j (k_j e^{G_t - G_j}) . q_t
    S   = S0 e^{G_C} + sum_j u_j (k_j e^{G_C - G_j})^T

The first line is a unit lower-triangular system for u. Its inverse and everything else that does not depend on S0
is computed for all chunks at once; only the walk over S0 is sequential.
"""

import itertools

import torch

from vllm_kimi_k3.ops.kda.reference import log_decay, normalise

#: Tokens a chunk. A decay of -5 a token sums to -80, so e^{-G} stays below e^80 and fits fp32.
CHUNK = 16


def _segments(
    starts: list[int], exports: list[tuple[int, int, int]]
) -> tuple[list[tuple[int, int]], list[list[tuple[int, int | None]]]]:
    """Cut each sequence at its export points and into chunks.

    Returns:
        the (offset, length) of every chunk, and for each sequence its chunks as (index, page to export to after it).
    """
    chunks: list[tuple[int, int]] = []
    plan: list[list[tuple[int, int | None]]] = []
    for index in range(len(starts) - 1):
        begin, end = starts[index], starts[index + 1]
        wanted = {begin + tokens: page for sequence, tokens, page in exports if sequence == index}
        bounds = sorted({*wanted, begin, end})
        walk: list[tuple[int, int | None]] = []
        for low, high in itertools.pairwise(bounds):
            for offset in range(low, high, CHUNK):
                length = min(CHUNK, high - offset)
                walk.append((len(chunks), wanted.get(offset + length)))
                chunks.append((offset, length))
        plan.append(walk)
    return chunks, plan


def kda_prefill_chunked(
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
    """As :func:`~vllm_kimi_k3.ops.kda.reference.kda_prefill_reference`, in chunks."""
    chunks, plan = _segments(starts, exports)
    if not chunks:
        return torch.empty_like(v)
    offset = torch.tensor([chunk[0] for chunk in chunks], device=q.device)
    length = torch.tensor([chunk[1] for chunk in chunks], device=q.device)
    step = torch.arange(CHUNK, device=q.device)
    real = step < length.unsqueeze(-1)
    token = (offset.unsqueeze(-1) + step).clamp(max=q.shape[0] - 1)

    def gather(x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] to [chunks, H, C, D], zeros in a chunk's tail."""
        return (x[token] * real[..., None, None]).transpose(1, 2)

    # A zero tail has no decay, no key and no weight: it leaves the state as it is.
    cum = gather(log_decay(gate, a_log, dt_bias, lower_bound)).cumsum(-2)
    keys, values = gather(normalise(k)), gather(v.float())
    queries = gather(normalise(q) * q.shape[-1] ** -0.5)
    weight = gather(torch.sigmoid(beta.float()).unsqueeze(-1))

    grown, shrunk = cum.exp(), (-cum).exp()
    keys_out, keys_in = keys * grown, keys * shrunk
    queries_out = queries * grown
    mutual = torch.tril(keys_out @ keys_in.transpose(-1, -2), diagonal=-1)
    identity = torch.eye(CHUNK, device=q.device)
    solve = torch.linalg.solve_triangular(
        identity + weight * mutual, identity.expand_as(mutual), upper=False, unitriangular=True
    )
    solve = solve * weight.transpose(-1, -2)
    own, carried = solve @ values, solve @ keys_out
    attend = torch.tril(queries_out @ keys_in.transpose(-1, -2))
    total = grown[..., -1:, :]
    keys_end = keys * (cum[..., -1:, :] - cum).exp()

    out = torch.empty(len(chunks), q.shape[1], CHUNK, v.shape[-1], device=q.device)
    for index, page in enumerate(pages):
        if not plan[index]:
            continue
        state = torch.zeros_like(states[page]) if fresh[index] else states[page]
        state = state.float()
        for chunk, export in plan[index]:
            delta = own[chunk] - carried[chunk] @ state.transpose(-1, -2)
            out[chunk] = queries_out[chunk] @ state.transpose(-1, -2) + attend[chunk] @ delta
            state = state * total[chunk] + delta.transpose(-1, -2) @ keys_end[chunk]
            if export is not None:
                states[export] = state.to(states.dtype)
        states[page] = state.to(states.dtype)
    result = torch.empty_like(v)
    result[token[real]] = out.transpose(1, 2)[real].to(v.dtype)
    return result
