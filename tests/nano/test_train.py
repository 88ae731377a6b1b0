"""Optimiser and training: steps that learn, states that go on, exports that compute what was trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vllm_kimi_k3.nano.batched import BatchedK3
from vllm_kimi_k3.nano.batches import Batch, load_tokenizer, make_batch
from vllm_kimi_k3.nano.checkpoint import build
from vllm_kimi_k3.nano.dialogue import Encoder
from vllm_kimi_k3.nano.layout import text_tensors
from vllm_kimi_k3.nano.optimiser import Optimiser, balance, orthogonalise
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.nano.start import starting_weights
from vllm_kimi_k3.nano.train import Plan, Training
from vllm_kimi_k3.nano.train_draft import DraftTraining, load_target
from vllm_kimi_k3.nano.train_draft import Plan as DraftPlan
from vllm_kimi_k3.reference import load_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [(3, 48, 16), (16, 48), (32, 32)], ids=["stack of tall", "wide", "square"])
def test_orthogonalised_matrices_stretch_all_directions_alike(size: tuple[int, ...]) -> None:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 100
    stretched = torch.linalg.svdvals(orthogonalise(drawn))
    assert stretched.min() > 0.4
    assert stretched.max() < 1.4


class _Regression(nn.Module):
    """A matrix for Muon and a vector for Adam."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.matrix = nn.Parameter(torch.randn(16, 16, generator=generator) * 0.1)
        self.vector = nn.Parameter(torch.zeros(16))
        self.x = torch.randn(64, 16, generator=generator)
        self.y = self.x @ torch.randn(16, 16, generator=generator) * 0.2 + 1

    def loss(self) -> torch.Tensor:
        return (self.x @ self.matrix + self.vector - self.y).square().mean()


def _advance(model: _Regression, optimiser: Optimiser, steps: int) -> None:
    for _ in range(steps):
        model.loss().backward()
        optimiser.step(1.0)


def test_optimiser_learns_and_goes_on_from_its_state() -> None:
    model = _Regression()
    optimiser = Optimiser(model, 0.02)
    begin = float(model.loss())
    _advance(model, optimiser, 20)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.utils._pytree.tree_map(lambda v: v.clone() if torch.is_tensor(v) else v, optimiser.state())
    _advance(model, optimiser, 20)
    assert float(model.loss()) < 0.2 * begin

    again = _Regression()
    again.load_state_dict(weights)
    resumed = Optimiser(again, 0.02)
    resumed.restore(state)
    _advance(again, resumed, 20)
    assert torch.equal(again.matrix, model.matrix)
    assert torch.equal(again.vector, model.vector)


def test_balance_evens_out_experts_that_nobody_or_everybody_wants() -> None:
    shape = Shape(num_hidden_layers=2)
    drawn = starting_weights(shape, text_tensors(shape), torch.Generator().manual_seed(0))
    model = BatchedK3(shape, drawn, torch.float32)
    generator = torch.Generator().manual_seed(1)
    wanted = torch.linspace(-2, 2, shape.num_experts)
    loads = [
        float(balance(model, (torch.randn(1, 4096, shape.num_experts, generator=generator) + wanted).sigmoid()))
        for _ in range(60)
    ]
    assert loads[0] > 2
    assert loads[-1] < 1.3


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(Encoder(load_tokenizer()), 1, 2, 128)


@pytest.fixture(scope="module")
def trained(batch: Batch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Training, list[float], Path]:
    """Three steps on one batch, their losses, and the state after the second."""
    training = Training(Plan(steps=10, tokens=256, warmup=1), CPU)
    path = tmp_path_factory.mktemp("state") / "state.pt"
    losses = []
    for step in range(3):
        losses.append(float(training.learn(batch)["loss"]))
        if step == 1:
            training.save(path)
    return training, losses, path


def test_training_learns(trained: tuple[Training, list[float], Path]) -> None:
    _, losses, _ = trained
    assert losses[2] < losses[1] < losses[0]


def test_training_resumes_to_the_bit(trained: tuple[Training, list[float], Path], batch: Batch) -> None:
    training, losses, path = trained
    resumed = Training(training.plan, CPU)
    resumed.resume(path)
    assert resumed.step == 2
    assert float(resumed.learn(batch)["loss"]) == losses[2]
    for name, value in training.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_a_state_of_another_plan_is_refused(trained: tuple[Training, list[float], Path]) -> None:
    _, _, path = trained
    other = Training(Plan(steps=10, tokens=512, warmup=1), CPU)
    with pytest.raises(ValueError, match="512"):
        other.resume(path)


def test_export_computes_what_was_trained(
    trained: tuple[Training, list[float], Path], batch: Batch, tmp_path: Path
) -> None:
    plan, path = trained[0].plan, trained[2]
    training = Training(plan, CPU)
    training.resume(path)
    with torch.no_grad():
        # The file holds bf16: rounded only on the way into it, a token near a tie would choose other experts.
        for parameter in training.model.parameters():
            parameter.copy_(parameter.bfloat16())
    training.export(tmp_path)
    ids = torch.from_numpy(batch.ids.astype("int64"))[:, :40]
    exported = load_checkpoint(tmp_path, torch.float32, chunk=16)
    with torch.no_grad():
        expected = training.model.logits(training.model(ids).hidden[0])
        found = exported.forward(ids[0])
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-2)
        again = load_target(tmp_path, CPU)
        torch.testing.assert_close(again.logits(again(ids).hidden[0]), found, atol=2e-4, rtol=1e-3)


def test_rate_rises_stays_and_falls() -> None:
    plan = Plan(steps=1000, warmup=100)
    assert plan.factor(0) == 0.01
    assert plan.factor(100) == plan.factor(399) == 1
    assert plan.factor(700) == pytest.approx(0.5)
    assert plan.factor(999) == pytest.approx(1 / 600)


def test_draft_training_learns_resumes_and_leaves_the_target(
    trained: tuple[Training, list[float], Path], batch: Batch, tmp_path: Path
) -> None:
    training, _, _ = trained
    training.export(tmp_path / "target")

    def fresh(**changes: Any) -> DraftTraining:
        plan: dict[str, Any] = {"steps": 10, "tokens": 256, "passes": 2, "warmup": 1} | changes
        return DraftTraining(DraftPlan(**plan), load_target(tmp_path / "target", CPU))

    first = fresh()
    before = {name: value.clone() for name, value in first.target.state_dict().items()}
    # A target after three steps follows no dialogue: what it would say counts only at the first slot.
    losses = []
    for step in range(4):
        losses.append(float(first.learn(batch, 0.0)["loss"]))
        if step == 2:
            first.save(tmp_path / "draft.pt")
    assert losses[3] < losses[0]
    assert all(torch.equal(value, before[name]) for name, value in first.target.state_dict().items())

    second = fresh()
    second.resume(tmp_path / "draft.pt")
    assert float(second.learn(batch, 0.0)["loss"]) == losses[3]
    with pytest.raises(ValueError, match="512"):
        fresh(tokens=512).resume(tmp_path / "draft.pt")


def test_a_checkpoint_of_other_sizes_is_refused(tmp_path: Path) -> None:

    path = build(tmp_path / "small", 0, num_hidden_layers=4, num_experts=4)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_target(path, CPU)
