"""Every kernel against fp64 at K3's sizes, in bf16 and fp32."""

import itertools

import pytest
import torch

from tests.gpu import oracle
from tests.gpu.oracle import BOUND, EPS, EXPERTS, HIDDEN, TOLERANCE, TOP_K, error

DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seen", [0, 1, 3, 8])
@pytest.mark.parametrize("tokens", [1, 17, 1500])
def test_attn_res(tokens: int, seen: int, dtype: torch.dtype) -> None:
    from vllm_kimi_k3.ops.attn_res.triton import attn_res_norm

    given = oracle.mix(tokens, dtype)
    expected, stream = oracle.mixed(given, seen), given["stream"] + given["delta"]
    snapshot = seen if seen < oracle.BLOCKS else None
    out = attn_res_norm(**given, seen=seen, snapshot=snapshot, eps=EPS, out_eps=EPS)
    # The mix, the normalised value and the product are rounded one after the other.
    assert error(out, expected) < 2 * TOLERANCE[dtype]
    assert torch.equal(given["stream"], stream)
    assert snapshot is None or torch.equal(given["blocks"][:, snapshot], stream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9000])
def test_situ(rows: int, dtype: torch.dtype) -> None:
    from vllm_kimi_k3 import reference
    from vllm_kimi_k3.ops.situ.triton import situ

    x = 10 * oracle.normal(rows, 1536, dtype=dtype)
    expected = reference.situ(*x.double().chunk(2, -1), 4.0, 25.0)
    assert error(situ(x, 4.0, 25.0), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("patches", "heads", "dim"), [(1, 12, 128), (16384, 12, 128), (131, 2, 24)])
def test_rotary(patches: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    from vllm_kimi_k3.ops.rotary.reference import rotary_reference
    from vllm_kimi_k3.ops.rotary.triton import rotary

    qkv = oracle.normal(3 * patches, heads * dim, dtype=dtype).view(patches, 3, heads, dim)
    angles = 500 * torch.rand(patches, dim // 2, device="cuda")
    expected, values = qkv.clone(), qkv[:, 2].clone()
    rotary_reference(expected, angles.cos(), angles.sin())
    rotary(qkv, angles.cos(), angles.sin())
    assert error(qkv, expected) < TOLERANCE[dtype]
    assert torch.equal(qkv[:, 2], values)


@pytest.mark.parametrize("tokens", [1, 64, 3000])
def test_router(tokens: int) -> None:
    from vllm_kimi_k3 import reference
    from vllm_kimi_k3.ops.router.triton import router

    x, weight = oracle.normal(tokens, HIDDEN), oracle.normal(EXPERTS, HIDDEN) / 64
    bias = 0.1 * torch.randn(EXPERTS, device="cuda")
    ids, weights = router(x, weight, bias, TOP_K, 1.0)
    scores = (x.double() @ weight.double().t()).sigmoid()
    expected_ids, _ = reference.route(x.double(), weight.double(), bias.double(), TOP_K, 1.0)
    assert all(len(set(row)) == TOP_K for row in ids.tolist())
    # Where two scores are equal up to rounding either may be chosen, so the sums are compared, not the ids.
    chosen = (scores + bias).gather(1, ids.long()).sum(1)
    torch.testing.assert_close(chosen, (scores + bias).gather(1, expected_ids).sum(1), rtol=1e-5, atol=1e-5)
    own = scores.gather(1, ids.long())
    torch.testing.assert_close(weights.double(), own / own.sum(1, keepdim=True), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (6, 128), (12, 128), (96, 128), (12, 64)])
def test_kda_decode_step(heads: int, dim: int, dtype: torch.dtype) -> None:
    from vllm_kimi_k3.ops.kda_step.triton import kda_decode_step

    pages = torch.tensor([3, -1, 9, 0, 11], device="cuda")
    given = oracle.kda(5, heads, dim, dtype, 12, 3)
    windows, states = given["windows"].clone(), given["states"].clone()
    out = kda_decode_step(**given, pages=pages, lower_bound=BOUND, eps=EPS)
    for i, page in enumerate(pages.tolist()):
        if page < 0:
            assert not out[i].any()
            continue
        token = slice(i, i + 1)
        _, expected, after = oracle.kda_sequence(given, token, windows[page], states[page])
        assert error(out[token], expected) < oracle.allowed(expected, dtype)
        assert error(given["states"][page], after[-1]) < TOLERANCE[torch.float32]
        assert torch.equal(given["windows"][page], torch.cat([windows[page, 1:], given["qkv"][token]]))
    untouched = [page for page in range(12) if page not in pages.tolist()]
    assert torch.equal(given["states"][untouched], states[untouched])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [6, 12])
def test_kda_verify_step(heads: int, dtype: torch.dtype) -> None:
    from vllm_kimi_k3.ops.kda_step.triton import kda_verify_step

    lengths, accepted = [8, 1, 0, 5], [1, 4, 2, 8]
    given = oracle.kda(sum(lengths), heads, 128, dtype, 33, 10)
    slots = torch.randperm(32, device="cuda").view(4, 8)
    starts = torch.tensor([0, 8, 9, 9, 14], device="cuda", dtype=torch.int32)
    windows, states = given["windows"].clone(), given["states"].clone()
    where = {"slots": slots, "starts": starts, "accepted": torch.tensor(accepted, device="cuda")}
    out = kda_verify_step(**given, **where, lower_bound=BOUND, eps=EPS)
    for i, length in enumerate(lengths):
        tokens, seen = slice(int(starts[i]), int(starts[i]) + length), accepted[i] - 1
        page = int(slots[i, 0])
        if length == 0:
            assert torch.equal(given["windows"][page], windows[page])
            continue
        window = windows[page, seen : seen + 3]
        _, expected, after = oracle.kda_sequence(given, tokens, window, states[slots[i, seen]])
        assert error(out[tokens], expected) < oracle.allowed(expected, dtype)
        for j, state in enumerate(after):
            assert error(given["states"][slots[i, j]], state) < TOLERANCE[torch.float32]
        assert torch.equal(given["windows"][page, : 2 + length], torch.cat([window[1:], given["qkv"][tokens]]))


@pytest.mark.parametrize("inner", [384, 192])
@pytest.mark.parametrize("tokens", [1, 3, 16, 65, 700])
@pytest.mark.parametrize("path", ["experts_by_pair", "experts_by_tile"])
def test_experts(path: str, tokens: int, inner: int) -> None:
    from vllm_kimi_k3.ops.experts import triton as kernels

    if path == "experts_by_pair" and tokens > 16:
        pytest.skip("this path serves few tokens")
    given = oracle.routed(tokens, torch.bfloat16) | oracle.expert_weights(inner)
    out = getattr(kernels, path)(**given, beta=4.0, linear_beta=25.0)
    # Gate and up, their product, an expert's output and the sum are rounded to bf16 one after the other.
    assert error(out, oracle.expert_sum(given, 4.0, 25.0)) < 3 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("path", ["experts_by_pair", "experts_by_tile"])
def test_experts_in_fp32(path: str) -> None:
    from vllm_kimi_k3.ops.experts import triton as kernels

    given = oracle.routed(5, torch.float32, 24, 256) | oracle.expert_weights(96, 24, 256)
    out = getattr(kernels, path)(**given, beta=4.0, linear_beta=None)
    assert error(out, oracle.expert_sum(given, 4.0, None)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (6, 128), (12, 128), (4, 64)])
@pytest.mark.parametrize("label", ["triton", "flash_kda"])
def test_kda_prefill(label: str, heads: int, dim: int, dtype: torch.dtype) -> None:
    """Against the recurrence in fp64, from inputs that are rounded after the convolution."""
    from vllm_kimi_k3 import reference
    from vllm_kimi_k3.ops.kda import kda_prefill

    lengths, pages, fresh = [1, 130, 0, 700], [3, 5, 6, 7], [False, True, False, False]
    exports, tokens = [(3, 64, 1), (3, 640, 2), (1, 128, 4)], 831
    given = {name: oracle.normal(tokens, heads, dim, dtype=dtype) for name in ("q", "k", "v")} | {
        "gate": (4 * oracle.normal(tokens, heads, dim, dtype=torch.float32)).to(dtype),
        "beta": oracle.normal(tokens, heads, dtype=dtype),
        "a_log": 2 * torch.rand(heads, device="cuda"),
        "dt_bias": 2 * oracle.normal(heads * dim, dtype=torch.float32),
    }
    states = oracle.normal(8, heads, dim, dim, dtype=torch.float32)
    before = states.clone()
    implementation = kda_prefill.named(label, states.device)
    if implementation is None or not implementation[1](given["q"]):
        pytest.skip(f"{label} does not take these arguments here")
    where = {"starts": [0, 1, 131, 131, 831], "pages": pages, "fresh": fresh, "exports": exports}
    out = implementation[2](**given, lower_bound=BOUND, states=states, **where)
    q, k = reference.normalise_qk(given["q"].double(), given["k"].double())
    decay = reference.log_decay(given["gate"].double(), given["a_log"].double(), given["dt_bias"].double(), BOUND)
    beta, v = given["beta"].double().sigmoid(), given["v"].double()
    for index, length in enumerate(lengths):
        state = before[pages[index]].double() * (not fresh[index])
        kept = {count: page for owner, count, page in exports if owner == index} | {length: pages[index]}
        outputs, first = [], where["starts"][index]
        for count in range(1, length + 1):
            t = slice(first + count - 1, first + count)
            y, state = reference.kda_recurrent(q[t], k[t], v[t], decay[t], beta[t], state)
            outputs.append(y)
            if count in kept:
                wrong = error(states[kept[count]], state)
                print("state after", count, wrong)
                assert wrong < TOLERANCE[dtype]
        if length:
            expected = torch.cat(outputs)
            wrong = error(out[first : first + length], expected)
            print("output of", length, wrong)
            assert wrong < oracle.allowed(expected, dtype)


@pytest.mark.parametrize("heads", [12, 24])
def test_the_compiled_kda_decode_step(heads: int) -> None:
    from vllm_kimi_k3.ops.kda_step import kda_decode_step

    implementation = kda_decode_step.named("vllm", torch.device("cuda"))
    if implementation is None:
        pytest.skip("vLLM has no such kernel here")
    pages = torch.tensor([3, -1, 9, 7, 11], device="cuda", dtype=torch.int32)
    given = oracle.kda(5, heads, 128, torch.bfloat16, 12, 3)
    inner = heads * 128
    # As the model has it: slices of one product whose rows are a multiple of 16 values apart.
    wide = torch.zeros(5, -(-(4 * inner + heads) // 16) * 16, device="cuda", dtype=torch.bfloat16)
    wide[:, : 3 * inner], wide[:, 3 * inner : 4 * inner] = given["qkv"], given["out_gate"].flatten(1)
    wide[:, 4 * inner : 4 * inner + heads] = given["beta"]
    given |= {
        "qkv": wide[:, : 3 * inner],
        "out_gate": wide[:, 3 * inner : 4 * inner].unflatten(-1, (heads, 128)),
        "beta": wide[:, 4 * inner : 4 * inner + heads],
        "norm_weight": given["norm_weight"].float(),
    }
    windows, states = given["windows"].clone(), given["states"].clone()
    out = implementation[2](**given, pages=pages, lower_bound=BOUND, eps=EPS)
    for i, page in enumerate(pages.tolist()):
        if page < 0:
            continue
        token = slice(i, i + 1)
        _, expected, after = oracle.kda_sequence(given, token, windows[page], states[page])
        print(page, error(out[token], expected), error(given["states"][page], after[-1]))
        assert error(out[token], expected) < 2 * TOLERANCE[torch.bfloat16]
        assert error(given["states"][page], after[-1]) < TOLERANCE[torch.bfloat16]
        assert torch.equal(given["windows"][page], torch.cat([windows[page, 1:], given["qkv"][token]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("new", [[1, 1, 100, 0], [1, 1, 1, 0]], ids=str)
@pytest.mark.parametrize(("heads", "rank", "rope"), [(12, 512, 64), (4, 64, 16), (1, 512, 64)])
def test_latent_attention(heads: int, rank: int, rope: int, new: list[int], dtype: torch.dtype) -> None:
    from vllm_kimi_k3.ops.latent_attention.reference import latent_attention_reference
    from vllm_kimi_k3.ops.latent_attention.triton import latent_attention

    lengths, page = [3000, 1, 350, 0], 64
    table = torch.randperm(4 * 47, device="cuda").view(4, 47).int()
    cache = oracle.normal(4 * 47, page, rank + rope, dtype=dtype)
    query = oracle.normal(sum(new), heads, rank + rope, dtype=dtype)
    starts = torch.tensor([0, *itertools.accumulate(new)], device="cuda", dtype=torch.int32)
    lengths = torch.tensor(lengths, device="cuda", dtype=torch.int32)
    where = (table, starts, lengths, max(new), rank, (rank + rope) ** -0.5)
    out = torch.full((sum(new), heads, rank), float("nan"), device="cuda", dtype=dtype)
    expected = torch.empty_like(out, dtype=torch.float64)
    latent_attention_reference(query.double(), cache.double(), *where, expected)
    latent_attention(query, cache, *where, out)
    wrong = error(out, expected)
    print("error", wrong)
    # The shares are rounded before they weigh the rows.
    assert wrong < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("inner", "latent"), [(384, 3584), (192, 3584)])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_marlin_experts(tokens: int, inner: int, latent: int) -> None:
    pytest.importorskip("vllm")
    from vllm_kimi_k3.compat.experts import marlin_experts, marlin_fits, repack

    if not marlin_fits(torch.device("cuda"), inner, latent, torch.bfloat16):
        pytest.skip("vLLM's Marlin experts do not run here")
    given = oracle.routed(tokens, torch.bfloat16, 64, latent) | oracle.expert_weights(inner, 64, latent)
    packed = repack(*(given[name].clone() for name in ("w13", "w13_scale", "w2", "w2_scale")), torch.bfloat16)
    out = marlin_experts(given["latent"], given["ids"], given["weights"], packed, 4.0, 25.0)
    wrong = error(out, oracle.expert_sum(given, 4.0, 25.0))
    print("error", wrong)
    assert wrong < 4 * TOLERANCE[torch.bfloat16]
