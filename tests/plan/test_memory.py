"""A whole plan: nothing of a GPU unaccounted for, answers that agree with one another, advice that holds."""

import pytest

from vllm_kimi_k3.plan.advice import alternatives
from vllm_kimi_k3.plan.gpus import GIB, by_device_name, find
from vllm_kimi_k3.plan.memory import Deployment, Plan
from vllm_kimi_k3.plan.parallel import Layout
from vllm_kimi_k3.plan.release import DRAFTS
from vllm_kimi_k3.plan.table import segments

B300 = Deployment(find("b300"), Layout(8))
CASES = {
    "tp8-b300": B300,
    "draft": B300.replace(draft=DRAFTS["Inferact/Kimi-K3-DSpark"], drafts=7),
    "fp8": B300.replace(kv_dtype="fp8", context=1 << 20),
    "tp8pp2-h200": Deployment(find("h200"), Layout(8, pp=2)),
    "tp8dp2-h200": Deployment(find("h200"), Layout(8, dp=2, ep=True), requests=4, context=8192),
}


@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_a_gpu_is_accounted_for(case: str) -> None:
    plan = Plan(CASES[case])
    for stage in plan.stages:
        assert sum(stage.parts.values()) + stage.pool == plan.budget
        assert sum(size for _, size in segments(plan, stage)) == plan.deployment.gpu.memory
    assert sum(plan.usage.values()) == plan.tightest.pool


@pytest.mark.parametrize("case", CASES)
def test_the_longest_request_fits_and_the_next_does_not(case: str) -> None:
    plan = Plan(CASES[case])
    assert plan.requests(plan.longest) >= 1
    if plan.longest < 1 << 20:
        assert plan.requests(plan.longest + 1) == 0


def test_longer_requests_never_fit_more_often() -> None:
    plan = Plan(CASES["draft"])
    counts = [plan.requests(context) for context in range(1000, 1 << 20, 50_000)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] > 0


def test_reported_weights_on_h200_at_tp8pp2_are_near_ours() -> None:
    # A public serving log says about 98 GiB a GPU.
    weights = [sum(v for k, v in s.parts.items() if k.startswith("weights")) for s in Plan(CASES["tp8pp2-h200"]).stages]
    assert max(weights) / GIB == pytest.approx(98, rel=0.02)


def test_replicas_add_up() -> None:
    two = Plan(CASES["tp8dp2-h200"])
    assert two.requests(8192) % 2 == 0
    assert two.requests(8192) == 2 * (two.blocks // two.tightest.pages.blocks(8192))


def test_eight_b200_do_not_hold_k3_and_the_advice_does() -> None:
    plan = Plan(Deployment(find("b200"), Layout(8)))
    assert not plan.fits
    assert plan.tightest.pool < 0
    assert plan.longest == plan.requests(1) == 0
    assert alternatives(plan)[:2] == ["16 GPUs as TP16", "16 GPUs as TP8·PP2"]


def test_a_context_that_is_too_long_is_answered_with_the_longest() -> None:
    plan = Plan(Deployment(find("h200"), Layout(8, pp=2), context=1 << 20, utilisation=0.8))
    assert plan.longest < 1 << 20
    assert f"--max-model-len {plan.longest}" in " ".join(alternatives(plan))
    assert Plan(plan.deployment.replace(context=plan.longest)).fits


def test_what_fits_needs_no_advice() -> None:
    assert Plan(B300).fits
    assert alternatives(Plan(B300)) == []


@pytest.mark.parametrize(
    ("name", "gib"), [("b300", 267.7), ("B300", 267.7), ("141GiB", 141.0), ("96 GB", 96e9 / GIB), ("0.5gib", 0.5)]
)
def test_gpus_by_name_and_size(name: str, gib: float) -> None:
    assert find(name).memory / GIB == pytest.approx(gib)


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(ValueError, match="--gpu 'b400': expected one of h100"):
        find("b400")


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI355X", "mi355x"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_gpus_by_the_drivers_name(device: str, name: str | None) -> None:
    found = by_device_name(device)
    assert (found and found.name) == name
