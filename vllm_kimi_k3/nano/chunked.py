"""KDA over whole batches: the gated delta rule in chunks, by matrix products alone.

With G the running sum of the log-decay inside a chunk and S the state before it, the updates of a chunk are
``U = (I + L)^-1 (beta V - beta (e^G K) S)``, its output is ``(e^G Q) S + P U`` and the next state is
``e^(G_end) S + (e^(G_end - G) K)^T U``: linear in S, so one scan gives all states. Only the scan knows where a sequence
begins; what comes before and after it sees chunks alone, C of them, each of CHUNK tokens and one head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

#: Exponents around the middle of a chunk stay within 5 * 31 / 2, which fp32 holds.
CHUNK = 32


class Chunks(NamedTuple):
    """What the chunks are without their states; fp32.

    ``step`` [C, K, K + V] is ``[A | B]`` of ``S <- A S + B``; ``query`` [C, CHUNK, K], ``within`` [C, CHUNK, CHUNK],
    ``u_state`` [C, CHUNK, K] and ``u_free`` [C, CHUNK, V] give the output once S is known.
    """

    step: Tensor
    query: Tensor
    within: Tensor
    u_state: Tensor
    u_free: Tensor


def prepare(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Chunks:
    """Everything that needs no state.

    Args:
        q, k, v, decay: fp32 [C, CHUNK, K]; q and k normalised, decay log.
        beta: fp32 [C, CHUNK, 1].
    """
    width = q.shape[-1]
    total = decay.cumsum(1)
    end = total[:, -1:]
    # Only differences of G matter inside a chunk; around the middle of its range neither factor overflows.
    middle = 0.5 * (total[:, :1] + end)
    rising, falling = (total - middle).exp(), (middle - total).exp()
    earlier = (k * falling).mT
    within = ((q * rising) @ earlier).tril()
    mixing = (beta * (k * rising) @ earlier).tril(-1)
    kept = total.exp()
    solved = _unit_lower_inverse(mixing) @ torch.cat([beta * k * kept, beta * v], dim=-1)
    u_state, u_free = solved.split(width, dim=-1)
    step = (k * (end - total).exp()).mT @ torch.cat([-u_state, u_free], dim=-1)
    carried = F.pad(torch.diag_embed(end.exp().squeeze(1)), (0, v.shape[-1]))
    return Chunks(step + carried, q * kept, within, u_state, u_free)


def finish(chunks: Chunks, states: Tensor) -> Tensor:
    """Output fp32 [C, CHUNK, V] from the state before each chunk [C, K, V]."""
    return chunks.query @ states + chunks.within @ (chunks.u_free - chunks.u_state @ states)


def _unit_lower_inverse(strict: Tensor) -> Tensor:
    """``(I + strict)^-1`` for strictly lower triangular [..., n, n]: a product, as ``strict^n`` is zero."""
    size = strict.shape[-1]
    power = -strict
    inverse = torch.eye(size, device=strict.device, dtype=strict.dtype) + power
    done = 2
    while done < size:
        power = power @ power
        inverse = inverse + inverse @ power
        done *= 2
    return inverse


def states_before(steps: Tensor) -> Tensor:
    """State before each step of ``S <- A S + B`` from zero, by pairing steps (a scan of log depth).

    Args:
        steps: [B, n, ..., K, K + V], ``[A | B]`` of each of the n steps.

    Returns:
        [B, n, ..., K, V].
    """
    count, width = steps.shape[1], steps.shape[-2]
    if count == 1:
        return torch.zeros_like(steps[..., width:])
    if count % 2:
        steps = torch.cat([steps, torch.zeros_like(steps[:, :1])], dim=1)
    first, second = steps[:, ::2], steps[:, 1::2]
    pair = second[..., :width] @ first
    pair = torch.cat([pair[..., :width], pair[..., width:] + second[..., width:]], dim=-1)
    even = states_before(pair)
    odd = first[..., :width] @ even + first[..., width:]
    return torch.stack([even, odd], dim=2).flatten(1, 2)[:, :count]
