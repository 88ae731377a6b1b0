"""KDA over whole batches: the gated delta rule in chunks, by matrix products alone."""

import torch
import torch.nn.functional as F
from torch import Tensor


def kda_chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """Output of the recurrence in :func:`vllm_kimi_k3.reference.kda_recurrent` from a zero state.

    With G the running sum of the log-decay inside a chunk and S the state before it, the updates of a chunk are
    ``U = (I + L)^-1 (beta V - beta (e^G K) S)``, its output is ``(e^G Q) S + P U`` and the next state is
    ``e^(G_end) S + (e^(G_end - G) K)^T U``: linear in S, so all states come from one scan.

    Args:
        q, k, v, decay: fp32 [rows, T, K]; q and k normalised, decay log. A row is a head of a sequence.
        beta: fp32 [rows, T].
        chunk: tokens a chunk, at most 32: exponents then stay within 5 * 31 / 2, which fp32 holds.

    Returns:
        fp32 [rows, T, K].
    """
    rows, length, width = q.shape

    def split(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -length % chunk)).unflatten(1, (-1, chunk))

    q, k, v, decay, beta = (split(x) for x in (q, k, v, decay, beta.unsqueeze(-1)))
    total = decay.cumsum(2)
    end = total[:, :, -1:]
    # Only differences of G matter inside a chunk; around the middle of its range neither factor overflows.
    middle = 0.5 * (total[:, :, :1] + end)
    rising, falling = (total - middle).exp(), (middle - total).exp()
    earlier = k * falling
    from_q = ((q * rising) @ earlier.mT).tril()
    mixing = (beta * (k * rising) @ earlier.mT).tril(-1)
    kept = total.exp()
    solved = _unit_lower_inverse(mixing) @ torch.cat([beta * k * kept, beta * v], dim=-1)
    u_state, u_free = solved.split(width, dim=-1)
    k_end = (k * (end - total).exp()).mT
    step = k_end @ torch.cat([-u_state, u_free], dim=-1)
    carried = torch.diag_embed(end.exp().squeeze(2))
    states = states_before(torch.cat([step[..., :width] + carried, step[..., width:]], dim=-1))
    out = (q * kept) @ states + from_q @ (u_free - u_state @ states)
    return out.flatten(1, 2)[:, :length]


def _unit_lower_inverse(strict: Tensor) -> Tensor:
    """``(I + strict)^-1`` for strictly lower triangular [..., n, n]: a product, as ``strict^n`` is zero."""
    size = strict.shape[-1]
    eye = torch.eye(size, device=strict.device, dtype=strict.dtype)
    power = -strict
    inverse = eye + power
    done = 2
    while done < size:
        power = power @ power
        inverse = inverse + inverse @ power
        done *= 2
    return inverse


def states_before(steps: Tensor) -> Tensor:
    """State before each step of ``S <- A S + B`` from zero, by pairing steps (a scan of log depth).

    Args:
        steps: [rows, n, K, K + V], ``[A | B]`` of each step.

    Returns:
        [rows, n, K, V].
    """
    count, width = steps.shape[1], steps.shape[2]
    if count == 1:
        return torch.zeros_like(steps[..., width:])
    if count % 2:
        steps = F.pad(steps, (0, 0, 0, 0, 0, 1))
    first, second = steps[:, ::2], steps[:, 1::2]
    pair = second[..., :width] @ first
    pair = torch.cat([pair[..., :width], pair[..., width:] + second[..., width:]], dim=-1)
    even = states_before(pair)
    odd = first[..., :width] @ even + first[..., width:]
    return torch.stack([even, odd], dim=2).flatten(1, 2)[:, :count]
