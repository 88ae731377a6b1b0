"""The fused KDA decode and verify kernels against their references."""

import pytest
import torch

from tests.ops.kernels import CLOSE, DEVICE
from vllm_kimi_k3.ops.kda.reference import log_decay
from vllm_kimi_k3.ops.kda_step import batched
from vllm_kimi_k3.ops.kda_step.reference import kda_decode_step_reference, kda_verify_step_reference
from vllm_kimi_k3.ops.kda_step.triton import kda_decode_step, kda_verify_step

BOUND, EPS, PAGES = -5.0, 1e-5, 24


def inputs(tokens: int, heads: int, dim: int, rows: int) -> dict[str, torch.Tensor]:
    """Random inputs, sliced out of one product as the model does; decays from -5 to nearly 0 a step."""
    torch.manual_seed(0)
    inner = heads * dim
    product = torch.randn(tokens, 4 * inner + heads, device=DEVICE)
    qkv, out_gate, beta = product.split([3 * inner, inner, heads], dim=-1)
    given = {
        "qkv": qkv,
        "gate": 4 * torch.randn(tokens, heads, dim, device=DEVICE),
        "beta": beta,
        "out_gate": out_gate.unflatten(-1, (heads, dim)),
        "conv_weight": torch.randn(3 * inner, 4, device=DEVICE),
        "windows": torch.randn(PAGES, rows, 3 * inner, device=DEVICE),
        "a_log": 2 * torch.rand(heads, device=DEVICE),
        "dt_bias": 2 * torch.randn(inner, device=DEVICE),
        "states": torch.randn(PAGES, heads, dim, dim, device=DEVICE),
        "norm_weight": torch.randn(dim, device=DEVICE),
    }
    if tokens:
        assert log_decay(given["gate"], given["a_log"], given["dt_bias"], BOUND).min() < -4.9
    return given


def compare(kernel, reference, given: dict[str, torch.Tensor], **where: torch.Tensor) -> None:
    expected_given = given | {name: given[name].clone() for name in ("windows", "states")}
    expected = reference(**expected_given, **where, lower_bound=BOUND, eps=EPS)
    out = kernel(**given, **where, lower_bound=BOUND, eps=EPS)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(given["states"], expected_given["states"], **CLOSE)
    torch.testing.assert_close(given["windows"], expected_given["windows"])


@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (3, 64), (6, 32), (12, 16)])
@pytest.mark.parametrize("pages", [[5], [23, -1, 0], []], ids=str)
def test_decode(heads: int, dim: int, pages: list[int]) -> None:
    given = inputs(len(pages), heads, dim, rows=3)
    where = {"pages": torch.tensor(pages, dtype=torch.int64, device=DEVICE)}
    compare(kda_decode_step, kda_decode_step_reference, given, **where)


@pytest.mark.parametrize("pages", [[5], [23, 2, 0], []], ids=str)
def test_decode_of_all_sequences_at_once(pages: list[int]) -> None:
    given = inputs(len(pages), 3, 16, rows=4)
    where = {"pages": torch.tensor(pages, dtype=torch.int64, device=DEVICE)}
    compare(batched.kda_decode_step, kda_decode_step_reference, given, **where)
    out = torch.full_like(given["gate"], float("nan"))
    again = batched.kda_decode_step(**given, **where, lower_bound=BOUND, eps=EPS, out=out)
    assert again is out
    assert torch.isfinite(out).all()


def test_decode_with_the_window_stored_channel_first() -> None:
    given = inputs(2, 3, 16, rows=3)
    given["windows"] = given["windows"].transpose(1, 2).contiguous().transpose(1, 2)
    compare(kda_decode_step, kda_decode_step_reference, given, pages=torch.tensor([1, 2], device=DEVICE))


@pytest.mark.parametrize("heads", [1, 6])
@pytest.mark.parametrize(
    ("lengths", "accepted"),
    [([4], [1]), ([4, 4], [4, 2]), ([1, 3, 0, 4], [3, 1, 2, 4]), ([4, 2, 2], [1, -1, 3])],
    ids=str,
)
def test_verify(heads: int, lengths: list[int], accepted: list[int]) -> None:
    """A sequence whose accepted count is -1 here is a padded row."""
    given = inputs(sum(lengths), heads, 32, rows=3 + 3)
    slots = torch.arange(4 * len(lengths), dtype=torch.int32, device=DEVICE).view(-1, 4)
    slots[torch.tensor(accepted) < 0] = -1
    where = {
        "slots": slots,
        "starts": torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=DEVICE),
        "accepted": torch.tensor(accepted, dtype=torch.int32, device=DEVICE),
    }
    compare(kda_verify_step, kda_verify_step_reference, given, **where)


def test_a_rejected_draft_leaves_no_trace() -> None:
    """Verify three tokens, keep one, go on: the same as never having seen the other two."""
    heads, dim = 2, 16
    given = inputs(5, heads, dim, rows=5)
    tokens = {name: given.pop(name) for name in ("qkv", "gate", "beta", "out_gate")}
    slots = torch.tensor([[0, 1, 2]], device=DEVICE)
    windows, states = given["windows"].clone(), given["states"].clone()

    def step(kernel, chosen: list[int], **where: torch.Tensor) -> torch.Tensor:
        part = {name: tensor[chosen] for name, tensor in tokens.items()}
        return kernel(**part, **given, **where, lower_bound=BOUND, eps=EPS)

    one = torch.tensor([1], device=DEVICE)
    step(kda_verify_step, [0, 1, 2], slots=slots, starts=torch.tensor([0, 3], device=DEVICE), accepted=one)
    out = step(kda_verify_step, [3, 4], slots=slots, starts=torch.tensor([0, 2], device=DEVICE), accepted=one)
    given["windows"], given["states"] = windows, states
    for token, expected in ((0, None), (3, out[:1]), (4, out[1:])):
        plain = step(kda_decode_step, [token], pages=slots[0, :1])
        if expected is not None:
            torch.testing.assert_close(expected, plain, **CLOSE)
