"""The small operations against the model's reference, at odd sizes and with empty input."""

import pytest
import torch

from vllm_kimi_k3 import reference
from vllm_kimi_k3.ops.attn_res import attn_res_norm
from vllm_kimi_k3.ops.experts import experts
from vllm_kimi_k3.ops.gated_norm import gated_norm
from vllm_kimi_k3.ops.latent_attention import latent_attention
from vllm_kimi_k3.ops.mxfp4 import dequantise
from vllm_kimi_k3.ops.operation import Operation
from vllm_kimi_k3.ops.router import router
from vllm_kimi_k3.ops.short_conv import short_conv_prefill
from vllm_kimi_k3.ops.short_conv.reference import short_conv_decode_reference
from vllm_kimi_k3.ops.situ import situ
from vllm_kimi_k3.settings import Settings

EPS = 1e-5


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("snapshots", [0, 1, 3, 8])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_attn_res(snapshots: int, tokens: int) -> None:
    stream, delta = torch.randn(2, tokens, 48)
    blocks = torch.randn(tokens, 9, 48)
    norm, proj, out = torch.randn(3, 48)
    expected = reference.attn_res(stream + delta, list(blocks[:, :snapshots].unbind(1)), norm, proj[None], EPS)
    mixed = attn_res_norm(stream.clone(), delta, blocks, snapshots, None, norm, proj[None], EPS, None, EPS)
    torch.testing.assert_close(mixed, expected)
    normed = attn_res_norm(stream, delta, blocks, snapshots, snapshots, norm, proj[None], EPS, out, 1e-6)
    torch.testing.assert_close(normed, reference.rms_norm(expected, out, 1e-6))
    torch.testing.assert_close(blocks[:, snapshots], stream)


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(linear_beta: float | None) -> None:
    gate, up = 10 * torch.randn(7, 12), 50 * torch.randn(7, 12)
    expected = reference.situ(gate, up, 4.0, linear_beta)
    torch.testing.assert_close(situ(torch.cat([gate, up], -1), 4.0, linear_beta), expected)


def test_gated_norm() -> None:
    x, gate, weight = torch.randn(5, 3, 16), torch.randn(5, 3, 16), torch.randn(16)
    torch.testing.assert_close(gated_norm(x, gate, weight, EPS), reference.gated_rms_norm(x, gate, weight, EPS))


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_router(tokens: int) -> None:
    x, weight, bias = torch.randn(tokens, 24), torch.randn(16, 24), torch.randn(16)
    ids, weights = router(x, weight, bias, 4, 1.5)
    expected_ids, expected = reference.route(x, weight, bias, 4, 1.5)
    assert torch.equal(ids.sort(-1).values, expected_ids.sort(-1).values)
    torch.testing.assert_close(weights.sort(-1).values, expected.sort(-1).values)


def packed(count: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every code, scales from 2^-3 to 2^2."""
    values = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8)
    return values, torch.randint(124, 130, (count, rows, columns // 32), dtype=torch.uint8)


def test_dequantise_every_byte() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scale = torch.arange(2, 251, 16, dtype=torch.uint8).view(16, 1)
    assert torch.equal(
        dequantise(values, scale, torch.float32), reference.mxfp4_dequantise(values, scale, torch.float32)
    )


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts(tokens: int) -> None:
    count, inner, latent = 6, 64, 32
    w13, s13 = packed(count, 2 * inner, latent)
    w2, s2 = packed(count, latent, inner)
    x, ids = torch.randn(tokens, latent), torch.stack([torch.randperm(count)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2)
    expected = torch.zeros(tokens, latent)
    for t in range(tokens):
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            gate, up = (reference.mxfp4_dequantise(w13[expert], s13[expert], torch.float32) @ x[t]).chunk(2)
            down = reference.mxfp4_dequantise(w2[expert], s2[expert], torch.float32)
            expected[t] += weight * (down @ reference.situ(gate, up, 4.0, 25.0))
    torch.testing.assert_close(experts(x, ids, weights, w13, s13, w2, s2, 4.0, 25.0), expected, rtol=1e-4, atol=1e-3)


def test_short_conv_carries_its_window() -> None:
    channels, lengths = 6, [1, 2, 9, 0, 4]
    x, weight = torch.randn(sum(lengths), channels), torch.randn(channels, 4)
    windows = torch.randn(8, 3, channels)
    before = windows.clone()
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    fresh = [True, False, False, False, True]
    out = short_conv_prefill(x, weight, windows, starts, [0, 1, 2, 3, 4], fresh, [(2, 5, 6)])
    for i in range(len(lengths)):
        if not lengths[i]:
            assert torch.equal(windows[i], before[i])
            continue
        tokens = x[starts[i] : starts[i + 1]]
        last = torch.zeros(channels, 3) if fresh[i] else before[i].t()
        expected, after = reference.short_conv(tokens, weight, last)
        torch.testing.assert_close(out[starts[i] : starts[i + 1]], expected)
        torch.testing.assert_close(windows[i], after.t())
    torch.testing.assert_close(windows[6], x[starts[2] + 2 : starts[2] + 5])


def test_short_conv_decode_is_a_prefill_of_one_token() -> None:
    x, weight, windows = torch.randn(3, 6), torch.randn(6, 4), torch.randn(5, 3, 6)
    expected_windows = windows.clone()
    expected = short_conv_prefill(x, weight, expected_windows, [0, 1, 2, 3], [4, 0, 2], [False] * 3, [])
    torch.testing.assert_close(short_conv_decode_reference(x, weight, windows, torch.tensor([4, 0, 2])), expected)
    torch.testing.assert_close(windows, expected_windows)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_latent_attention_over_scattered_blocks(block_size: int) -> None:
    heads, rank, rope, scale = 3, 8, 4, 0.3
    new, lengths = [1, 5, 0, 7], [9, 5, 3, 20]
    blocks = [-(-length // block_size) for length in lengths]
    table = torch.zeros(4, max(blocks), dtype=torch.int32)
    ids = torch.randperm(sum(blocks) + 2)
    cache = torch.randn(sum(blocks) + 2, block_size, rank + rope)
    for i, count in enumerate(blocks):
        table[i, :count] = ids[sum(blocks[:i]) : sum(blocks[: i + 1])]
    query = torch.randn(sum(new), heads, rank + rope)
    starts = [sum(new[:i]) for i in range(5)]
    where = (torch.tensor(starts), torch.tensor(lengths), max(new))
    out = torch.full((sum(new), heads, rank), float("nan"))
    latent_attention(query, cache, table, *where, rank, scale, out)
    for i, length in enumerate(lengths):
        rows = cache[table[i, : blocks[i]].long()].flatten(0, 1)[:length]
        for j in range(new[i]):
            seen = rows[: length - new[i] + j + 1]
            for head in range(heads):
                weights = torch.softmax(seen @ query[starts[i] + j, head] * scale, 0)
                torch.testing.assert_close(out[starts[i] + j, head], weights @ seen[:, :rank])


def test_an_operation_prefers_what_fits_the_device() -> None:
    operation = Operation("example", lambda x: "reference")
    operation.add("elsewhere", lambda device: device.type == "cuda", lambda x: "elsewhere")
    assert operation(torch.empty(0)) == "reference"
    operation.add("fast", lambda device: device.type == "cpu", lambda x: "fast")
    assert operation(torch.empty(0)) == "fast"


def test_an_operation_runs_what_is_to_be_asked_for_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Operation:
        operation = Operation("example", lambda x: "reference")
        operation.add("other", lambda device: device.type == "cpu", lambda x: "other", asked=True)
        return operation

    assert made()(torch.empty(0)) == "reference"
    assert not made().has_kernel(torch.device("cpu"))
    assert made().named("other", torch.device("cpu")) is not None
    assert made().named("other", torch.device("meta")) is None
    monkeypatch.setattr("vllm_kimi_k3.ops.operation.settings", lambda: Settings(operations="example=other"))
    assert made()(torch.empty(0)) == "other"
