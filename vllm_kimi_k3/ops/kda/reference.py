"""KDA token by token, in plain torch: the recurrence as it is defined."""

import torch

#: Added to the sum of squares when queries and keys are normalised.
L2_EPS = 1e-6


def normalise(x: torch.Tensor) -> torch.Tensor:
    """[..., D] to unit length in fp32, the eps inside the root."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def log_decay(gate: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float) -> torch.Tensor:
    """``lower_bound * sigmoid(exp(A_log) (gate + dt_bias))``, in [lower_bound, 0].

    Args:
        gate: [T, H, K].
        a_log: [H], one a head.
        dt_bias: [H * K].
        lower_bound: negative.

    Returns:
        [T, H, K] fp32.
    """
    shifted = gate.float() + dt_bias.float().view(gate.shape[-2:])
    return lower_bound * torch.sigmoid(a_log.float().exp().unsqueeze(-1) * shifted)


def kda_step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each of N sequences: decay, delta rule on the decayed state, read the new state.

    Args:
        state: [N, H, V, K] fp32.
        q, k: [N, H, K] fp32, normalised; q scaled.
        v: [N, H, V] fp32.
        decay: [N, H, K] fp32, log.
        beta: [N, H] fp32 in (0, 1).

    Returns:
        output [N, H, V] and the new state.
    """
    state = state * decay.exp().unsqueeze(-2)
    delta = beta.unsqueeze(-1) * (v - torch.einsum("nhvk,nhk->nhv", state, k))
    state = state + delta.unsqueeze(-1) * k.unsqueeze(-2)
    return torch.einsum("nhvk,nhk->nhv", state, q), state


def kda_decode_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float,
    states: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """One token of each of N sequences, their states updated in place.

    Args:
        q, k: [N, H, K] after the convolution.
        v: [N, H, V].
        gate: [N, H, K], the decay's raw gate.
        beta: [N, H], before its sigmoid.
        a_log, dt_bias, lower_bound: of the decay, see :func:`log_decay`.
        states: [P, H, V, K], the pages of the layer's state.
        pages: [N] int64, the page of each sequence.

    Returns:
        [N, H, V] in v's dtype.
    """
    out, state = kda_step(
        states[pages].float(),
        normalise(q) * q.shape[-1] ** -0.5,
        normalise(k),
        v.float(),
        log_decay(gate, a_log, dt_bias, lower_bound),
        torch.sigmoid(beta.float()),
    )
    states[pages] = state.to(states.dtype)
    return out.to(v.dtype)


def kda_prefill_reference(
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
    """Sequences of any length, packed; the definition that :func:`kda_prefill_chunked` is tested against.

    Args:
        q, k: [T, H, K] after the convolution.
        v: [T, H, V].
        gate: [T, H, K], the decay's raw gate.
        beta: [T, H], before its sigmoid.
        a_log, dt_bias, lower_bound: of the decay, see :func:`log_decay`.
        states: [P, H, V, K]; read and written in place.
        starts: N + 1 offsets of the sequences in T.
        pages: N pages; a sequence starts from its page's state and leaves its last state there.
        fresh: N flags; a fresh sequence starts from zeros whatever its page holds.
        exports: (sequence, tokens, page): also leave the state after that many tokens of the sequence in that page.

    Returns:
        [T, H, V] in v's dtype.
    """
    decay = log_decay(gate, a_log, dt_bias, lower_bound)
    q, k = normalise(q) * q.shape[-1] ** -0.5, normalise(k)
    weight = torch.sigmoid(beta.float())
    out = torch.empty_like(v)
    for index, page in enumerate(pages):
        if starts[index] == starts[index + 1]:
            continue
        state = torch.zeros_like(states[page]) if fresh[index] else states[page].clone()
        state = state.float().unsqueeze(0)
        wanted = {tokens: target for sequence, tokens, target in exports if sequence == index}
        for count, t in enumerate(range(starts[index], starts[index + 1]), start=1):
            y, state = kda_step(state, q[None, t], k[None, t], v[None, t].float(), decay[None, t], weight[None, t])
            out[t] = y[0].to(out.dtype)
            if count in wanted:
                states[wanted[count]] = state[0].to(states.dtype)
        states[page] = state[0].to(states.dtype)
    return out
