"""KDA in chunks, in plain torch: the same recurrence as matrix products.

Inside a chunk that starts from state S0, with G_t the log-decay summed up to and including token t:

    u_t = beta_t (v_t - S0 (k_t e^{G_t}) - sum_{j<t} u_j (k_j e^{G_t - G_j}) . k_t)
    o_t = S0 (q_t e^{G_t}) + sum_{j<=t} u_j (k_j e^{G_t - G_j}) . q_t
    S   = S0 e^{G_C} + sum_j u_j (k_j e^{G_C - G_j})^T

The first line is a unit lower-triangular system for u. Its inverse and everything else that does not depend on S0
is computed for all chunks at once; only the walk over S0 is sequential.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass
class Chunks:
    """What the walk over the states needs of N chunks of C tokens; all fp32.

    Attributes:
        own, carried: [N, H, C, V] and [N, H, C, K]: u is ``own - carried S0^T``.
        queries, attend: [N, H, C, K] and [N, H, C, C]: the output is ``queries S0^T + attend u``.
        keys, total: [N, H, C, K] and [N, H, K]: the state after the chunk is ``S0 * total + u^T keys``.
        plan: for each sequence its chunks in order, as (index, page that also gets the state after it or None).
    """

    own: torch.Tensor
    carried: torch.Tensor
    queries: torch.Tensor
    attend: torch.Tensor
    keys: torch.Tensor
    total: torch.Tensor
    plan: list[list[tuple[int, int | None]]]


#: From chunks, states, and each sequence's page and freshness to the outputs [N, H, C, V]; states in place.
Walk = Callable[[Chunks, torch.Tensor, list[int], list[bool]], torch.Tensor]


def walk_reference(chunks: Chunks, states: torch.Tensor, pages: list[int], fresh: list[bool]) -> torch.Tensor:
    """One sequence after the other, chunk by chunk; see :data:`Walk`."""
    out = torch.empty_like(chunks.own)
    for index, page in enumerate(pages):
        if not chunks.plan[index]:
            continue
        state = torch.zeros_like(states[page]) if fresh[index] else states[page]
        state = state.float()
        for chunk, export in chunks.plan[index]:
            delta = chunks.own[chunk] - chunks.carried[chunk] @ state.transpose(-1, -2)
            out[chunk] = chunks.queries[chunk] @ state.transpose(-1, -2) + chunks.attend[chunk] @ delta
            state = state * chunks.total[chunk].unsqueeze(-2) + delta.transpose(-1, -2) @ chunks.keys[chunk]
            if export is not None:
                states[export] = state.to(states.dtype)
        states[page] = state.to(states.dtype)
    return out


def prefill(
    walk: Walk,
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
    """As :func:`~vllm_kimi_k3.ops.kda.reference.kda_prefill_reference`, in chunks that ``walk`` goes through."""
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
    prepared = Chunks(
        own=solve @ values,
        carried=solve @ keys_out,
        queries=queries_out,
        attend=torch.tril(queries_out @ keys_in.transpose(-1, -2)),
        keys=keys * (cum[..., -1:, :] - cum).exp(),
        total=grown[..., -1, :],
        plan=plan,
    )
    out = walk(prepared, states, pages, fresh)
    result = torch.empty_like(v)
    result[token[real]] = out.transpose(1, 2)[real].to(v.dtype)
    return result


#: The whole of it in plain torch.
kda_prefill_chunked = functools.partial(prefill, walk_reference)
