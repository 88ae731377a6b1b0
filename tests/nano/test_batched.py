"""The training twin against the reference."""

import pytest
import torch
import torch.nn.functional as F

from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.checkpoint import pack, random_weights
from vllm_kimi_k3.nano.chunked import CHUNK, finish, prepare, states_before
from vllm_kimi_k3.nano.layout import text_tensors
from vllm_kimi_k3.nano.quantised import rounded, straight_through
from vllm_kimi_k3.nano.shape import Shape, k3_config
from vllm_kimi_k3.reference import (
    K3Config,
    KimiK3,
    kda_recurrent,
    mxfp4_dequantise,
    mxfp4_quantise,
    normalise_qk,
)

SHAPE = Shape(num_hidden_layers=5, num_experts=4)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    drawn = random_weights(SHAPE, text_tensors(SHAPE), torch.Generator().manual_seed(5))
    # The reference reads the stored checkpoint, so both sides start from weights that bf16 holds.
    return {n: w if n.endswith(("A_log", "bias")) else w.bfloat16().float() for n, w in drawn.items()}


def _reference(weights: dict[str, torch.Tensor]) -> KimiK3:
    stored = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in pack(text_tensors(SHAPE), weights)}
    return KimiK3(K3Config.from_dict(k3_config(SHAPE)), stored, torch.float32, chunk=16)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 65, 130])
def test_logits_and_taps_equal_the_reference(weights: dict[str, torch.Tensor], length: int) -> None:
    ids = torch.randint(0, SHAPE.vocab_size, (2, length), generator=torch.Generator().manual_seed(length))
    twin = BatchedK3(SHAPE, weights, torch.float32)
    hidden, taps, scores = twin(ids, taps=(1, 4))
    assert scores.shape == (4, 2, length, SHAPE.num_experts)
    reference = _reference(weights)
    for row in range(2):
        stream = reference.run(reference.embed(ids[row]), aux_layers=(1, 4))
        torch.testing.assert_close(twin.logits(hidden[row]), reference.logits(stream.hidden), atol=2e-4, rtol=1e-4)
        for tap, expected in zip(taps, stream.aux, strict=True):
            torch.testing.assert_close(tap[row], expected, atol=2e-4, rtol=1e-4)


def test_gradients_equal_the_reference(weights: dict[str, torch.Tensor]) -> None:
    ids = torch.randint(0, SHAPE.vocab_size, (1, 70), generator=torch.Generator().manual_seed(1))
    twin = BatchedK3(SHAPE, weights, torch.float32)
    twin.logits(twin(ids).hidden).logsumexp(-1).mean().backward()
    reference = _reference(weights)
    names = [
        "model.layers.0.self_attn.A_log",
        "model.layers.1.self_attn.k_conv1d.weight",
        "model.layers.2.self_attn.f_a_proj.weight",
        "model.layers.3.self_attn.kv_b_proj.weight",
        "model.layers.4.block_sparse_moe.gate.weight",
        "model.layers.2.mlp_res_proj.weight",
    ]
    for name in names:
        reference.weights[name].requires_grad_()
    reference.forward(ids[0]).logsumexp(-1).mean().backward()
    for name in names:
        ours = twin.get_parameter(f"language_model.{name}".replace(".", "/")).grad
        theirs = reference.weights[name].grad
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(ours, theirs, atol=1e-3 * float(theirs.abs().max()), rtol=1e-3, msg=name)


def test_published_gives_back_every_weight(weights: dict[str, torch.Tensor]) -> None:
    found = BatchedK3(SHAPE, weights, torch.float32).published()
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def _chunked(*inputs: torch.Tensor) -> torch.Tensor:
    """q, k, v, decay [rows, T, K] and beta [rows, T] through the three steps of the chunked form."""
    rows, length = inputs[0].shape[:2]
    padded = (F.pad(x.view(rows, length, -1), (0, 0, 0, -length % CHUNK)) for x in inputs)
    chunks = prepare(*(x.reshape(-1, CHUNK, x.shape[-1]) for x in padded))
    states = states_before(chunks.step.unflatten(0, (rows, -1))).flatten(0, 1)
    return finish(chunks, states).unflatten(0, (rows, -1)).flatten(1, 2)[:, :length]


@pytest.mark.parametrize("strength", ["weak", "strong", "mixed"])
@pytest.mark.parametrize("length", [1, 32, 100])
def test_chunks_equal_the_recurrence(length: int, strength: str) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v, raw = (torch.randn(3, length, 64, generator=generator, dtype=torch.float32) for _ in range(4))
    q, k = normalise_qk(q, k)
    decay = {"weak": -1e-4 * raw.abs(), "strong": torch.full_like(raw, -5.0), "mixed": -5.0 * raw.sigmoid()}[strength]
    inputs = [x.requires_grad_() for x in (q, k, v, decay, torch.rand(3, length, generator=generator))]
    weight = torch.randn(3, length, 64, generator=generator)

    ours = _chunked(*inputs)
    expected = kda_recurrent(*(x.transpose(0, 1) for x in inputs), torch.zeros(3, 64, 64))[0].transpose(0, 1)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    gradients = (torch.autograd.grad((out * weight).sum(), inputs) for out in (ours, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


def test_scan_equals_the_loop() -> None:
    steps = torch.randn(2, 7, 4, 9, generator=torch.Generator().manual_seed(0)) * 0.5
    state, expected = torch.zeros(2, 4, 5), []
    for i in range(7):
        expected.append(state)
        state = steps[:, i, :, :4] @ state + steps[:, i, :, 4:]
    torch.testing.assert_close(states_before(steps), torch.stack(expected, dim=1))


def test_rounding_equals_the_packed_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    weight = torch.cat([torch.randn(64, 32, generator=generator), ties[None], -ties[None], torch.zeros(1, 32)])
    weight = torch.cat([weight, weight * 1e-3, weight * 300])
    assert torch.equal(rounded(weight), mxfp4_dequantise(*mxfp4_quantise(weight), torch.float32))
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


def test_gradient_passes_through_the_rounding() -> None:
    weight = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    factor = torch.arange(64.0).view(2, 32)
    (straight_through(weight) * factor).sum().backward()
    assert torch.equal(weight.grad, factor)
