"""The KDA mixer of short sequences, from the raw projections to the gated norm, in plain torch."""

import torch
import torch.nn.functional as F

from vllm_kimi_k3.ops.gated_norm.reference import gated_norm_reference
from vllm_kimi_k3.ops.kda.reference import kda_step, log_decay, normalise


def kda_decode_step_reference(
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
    """One token of each of N sequences: convolution, gates, delta rule, gated norm; windows and states in place.

    Nothing between is rounded to the input's dtype.

    Args:
        qkv: [N, 3 * H * D], raw projections, q before k before v.
        gate: [N, H, D], the decay's raw gate.
        beta: [N, H], before its sigmoid.
        out_gate: [N, H, D], before its sigmoid.
        conv_weight: [3 * H * D, K] fp32, the newest input last.
        windows: [P, W, 3 * H * D]: the raw inputs before a sequence's next token, in rows 0 to K - 2 of its page.
        a_log, dt_bias, lower_bound: of the decay, see :func:`~vllm_kimi_k3.ops.kda.reference.log_decay`.
        states: [P, H, D, D], value before key.
        pages: [N] int; a negative page is a padded row: nothing is read or written for it, its output is zero.
        norm_weight: [D], of the norm over a head.
        eps: of that norm.
        out: [N, H, D] in the dtype of ``qkv``, contiguous: where the result goes.

    Returns:
        ``out``, or a new tensor where none is given.
    """
    real = (pages >= 0).nonzero().squeeze(-1)
    starts = torch.arange(len(real) + 1, device=qkv.device)
    out = torch.empty_like(gate, dtype=qkv.dtype) if out is None else out
    out.zero_()
    out[real] = kda_verify_step_reference(
        qkv[real],
        gate[real],
        beta[real],
        out_gate[real],
        conv_weight,
        windows,
        a_log,
        dt_bias,
        lower_bound,
        states,
        pages[real, None],
        norm_weight,
        eps,
        starts,
        torch.ones_like(starts[1:]),
    )
    return out


def kda_verify_step_reference(
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
    slots: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    starts: torch.Tensor,
    accepted: torch.Tensor,
) -> torch.Tensor:
    """A few tokens of each of N sequences, a state kept after every one, so that a draft can be undone.

    Args:
        qkv, gate, beta, out_gate, conv_weight, a_log, dt_bias, lower_bound, states, norm_weight, eps: as in
            :func:`kda_decode_step_reference`, with T tokens packed.
        windows: [P, W, 3 * H * D] in the page of a sequence's slot 0: its K - 1 inputs before this step begin at row
            ``accepted - 1``; afterwards row 0 begins the K - 1 inputs up to the step's first token, row 1 those up to
            its second, and so on; W is at least K - 2 plus the tokens of a sequence.
        slots: [N, S] int, pages: the state is read from slot ``accepted - 1`` and left after token j in slot j.
            Negative in slot 0 for a padded row.
        starts: [N + 1] int, offsets of the sequences in T.
        accepted: [N] int, tokens of the last step that stayed, at least 1.

    Returns:
        [T, H, D] in the dtype of ``qkv``; zero for the tokens of padded rows.
    """
    heads, dim = gate.shape[-2:]
    reach = conv_weight.shape[1] - 1
    decay = log_decay(gate, a_log, dt_bias, lower_bound)
    mixed = torch.zeros_like(gate, dtype=torch.float32)
    bounds = starts.tolist()
    for index, (page, *_) in enumerate(slots.tolist()):
        tokens = slice(bounds[index], bounds[index + 1])
        if page < 0 or tokens.start == tokens.stop:
            continue
        seen = int(accepted[index]) - 1
        inputs = torch.cat([windows[page, seen : seen + reach].to(qkv.dtype), qkv[tokens]])
        conv = F.conv1d(inputs.float().t().unsqueeze(0), conv_weight.float().unsqueeze(1), groups=inputs.shape[1])
        q, k, v = F.silu(conv.squeeze(0).t()).view(-1, 3, heads, dim).unbind(1)
        q, k = normalise(q) * dim**-0.5, normalise(k)
        windows[page, : len(inputs) - 1] = inputs[1:].to(windows.dtype)
        state = states[slots[index, seen]].float().unsqueeze(0)
        for j, t in enumerate(range(tokens.start, tokens.stop)):
            weight = torch.sigmoid(beta[None, t].float())
            mixed[t], state = kda_step(state, q[None, j], k[None, j], v[None, j], decay[None, t], weight)
            states[slots[index, j]] = state[0].to(states.dtype)
    return gated_norm_reference(mixed, out_gate.reshape(mixed.shape), norm_weight, eps).to(qkv.dtype)
