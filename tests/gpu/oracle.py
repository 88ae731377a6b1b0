"""The model's reference in fp64, on the arguments of the operations; and random arguments at K3's sizes."""

import torch

from vllm_kimi_k3 import reference

BOUND, EPS = -5.0, 1e-5
HIDDEN, LATENT, EXPERTS, TOP_K, BLOCKS = 7168, 3584, 896, 16, 8
#: Greatest relative error of a bf16 result and of an fp32 one.
TOLERANCE = {torch.bfloat16: 2e-3, torch.float32: 1e-4}


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected value."""
    return float((result.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def allowed(expected: torch.Tensor, dtype: torch.dtype) -> float:
    """Greatest relative error of a result in a dtype.

    Rounding alone moves 128 values in bf16 by 1.1e-3 to 2.4e-3 of their norm (150 draws), so a short vector is held to
    what rounding the expected one does to it, where that is more.
    """
    return max(TOLERANCE[dtype], 1.25 * error(expected.to(dtype), expected))


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def mix(tokens: int, dtype: torch.dtype, hidden: int = HIDDEN) -> dict[str, torch.Tensor]:
    """Stream, pending delta, snapshots and weights of an AttnRes site."""
    return {
        "stream": normal(tokens, hidden, dtype=dtype),
        "delta": normal(tokens, hidden, dtype=dtype),
        "blocks": normal(tokens, BLOCKS, hidden, dtype=dtype),
        "norm_weight": normal(hidden, dtype=dtype),
        "proj_weight": (normal(1, hidden, dtype=torch.float32) / hidden**0.5).to(dtype),
        "out_weight": normal(hidden, dtype=dtype),
    }


def mixed(given: dict[str, torch.Tensor], seen: int) -> torch.Tensor:
    """The site's result; the sum is rounded to the stream's dtype, nothing after it."""
    stream = (given["stream"] + given["delta"]).double()
    blocks = [block.double() for block in given["blocks"][:, :seen].unbind(1)]
    out = reference.attn_res(stream, blocks, given["norm_weight"].double(), given["proj_weight"].double(), EPS)
    return reference.rms_norm(out, given["out_weight"].double(), EPS)


def kda(tokens: int, heads: int, dim: int, dtype: torch.dtype, pages: int, rows: int) -> dict[str, torch.Tensor]:
    """Projections, weights, windows and states of a KDA layer; decays cover -5 to nearly 0 a step."""
    inner = heads * dim
    product = normal(tokens, 4 * inner + dim + heads, dtype=dtype)
    qkv, out_gate, _, beta = product.split([3 * inner, inner, dim, heads], dim=-1)
    return {
        "qkv": qkv,
        "gate": (4 * normal(tokens, heads, dim, dtype=torch.float32)).to(dtype),
        "beta": beta,
        "out_gate": out_gate.unflatten(-1, (heads, dim)),
        "conv_weight": normal(3 * inner, 4, dtype=torch.float32),
        "windows": normal(pages, rows, 3 * inner, dtype=dtype),
        "a_log": 2 * torch.rand(heads, device="cuda"),
        "dt_bias": 2 * normal(inner, dtype=torch.float32),
        "states": normal(pages, heads, dim, dim, dtype=torch.float32),
        "norm_weight": normal(dim, dtype=dtype),
    }


def kda_sequence(
    given: dict[str, torch.Tensor], tokens: slice, window: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Tokens of one sequence, from its window [3, C] and state.

    Returns:
        the recurrence's output and the gated norm's, [T, H, D], and the state after every token.
    """
    heads, dim = given["gate"].shape[-2:]
    conv, _ = reference.short_conv(given["qkv"][tokens].double(), given["conv_weight"].double(), window.double().t())
    q, k, v = conv.view(-1, 3, heads, dim).unbind(1)
    q, k = reference.normalise_qk(q, k)
    gate = given["gate"][tokens].double()
    decay = reference.log_decay(gate, given["a_log"].double(), given["dt_bias"].double(), BOUND)
    beta = given["beta"][tokens].double().sigmoid()
    outputs, states = [], []
    state = state.double()
    for t in range(q.shape[0]):
        out, state = reference.kda_recurrent(
            q[t : t + 1], k[t : t + 1], v[t : t + 1], decay[t : t + 1], beta[t : t + 1], state
        )
        outputs.append(out)
        states.append(state)
    mixed_heads = torch.cat(outputs)
    out_gate = given["out_gate"][tokens].double()
    normed = reference.gated_rms_norm(mixed_heads, out_gate, given["norm_weight"].double(), EPS)
    return mixed_heads, normed, states


def expert_weights(inner: int, count: int = EXPERTS, latent: int = LATENT) -> dict[str, torch.Tensor]:
    """Packed experts with every code; outputs about as large as inputs."""

    def packed(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        values = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8, device="cuda")
        return values, torch.randint(119, 122, (count, rows, columns // 32), dtype=torch.uint8, device="cuda")

    w13, w13_scale = packed(2 * inner, latent)
    w2, w2_scale = packed(latent, inner)
    return {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}


def routed(tokens: int, dtype: torch.dtype, count: int = EXPERTS, latent: int = LATENT) -> dict[str, torch.Tensor]:
    """Inputs, and experts chosen evenly."""
    return {
        "latent": normal(tokens, latent, dtype=dtype),
        "ids": torch.rand(tokens, count, device="cuda").topk(TOP_K).indices.int(),
        "weights": torch.rand(tokens, TOP_K, device="cuda").softmax(-1),
    }


def expert_sum(given: dict[str, torch.Tensor], beta: float, linear_beta: float | None) -> torch.Tensor:
    """The weighted sum over experts; nothing is rounded."""
    x, ids = given["latent"].double(), given["ids"]
    total = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        up_down = reference.mxfp4_dequantise(given["w13"][expert], given["w13_scale"][expert], torch.float64)
        gate, up = (x[token] @ up_down.t()).chunk(2, dim=-1)
        down = reference.mxfp4_dequantise(given["w2"][expert], given["w2_scale"][expert], torch.float64)
        out = reference.situ(gate, up, beta, linear_beta) @ down.t()
        total.index_add_(0, token, out * given["weights"][token, slot, None].double())
    return total
