"""The draft-length controller: what it learns, what it chooses, and how it fares in the simulation."""

import random

import pytest

from benchmarks.draft_length import KINDS, MOST, STEPS, Server, acceptance, cost, mixes
from vllm_kimi_k3.dspark.controller import Acceptance, DraftLength, StepTimes


def test_rates_come_near_what_happens_and_follow_a_change() -> None:
    known, chance = Acceptance(3), random.Random(1)

    def steps(rates: tuple[float, ...]) -> None:
        for _ in range(1500):
            accepted = 0
            while accepted < 3 and chance.random() < rates[accepted]:
                accepted += 1
            known.observe(3, accepted)

    steps((0.9, 0.6, 0.3))
    assert known.rates() == pytest.approx([0.9, 0.6, 0.3], abs=0.12)
    steps((0.2, 0.6, 0.3))
    assert known.rates()[0] == pytest.approx(0.2, abs=0.12)


def test_a_position_never_reached_is_taken_to_be_like_the_one_before() -> None:
    known = Acceptance(4)
    for _ in range(200):
        known.observe(2, 1)
    first, second, third, fourth = known.rates()
    assert first > 0.95 and second < 0.05
    assert second == third == fourth


@pytest.mark.parametrize(("drafted", "accepted"), [(2, 3), (5, 1), (2, -1)])
def test_impossible_results_are_refused(drafted: int, accepted: int) -> None:
    with pytest.raises(ValueError, match=f"{accepted} accepted of {drafted} drafts of at most 4"):
        Acceptance(4).observe(drafted, accepted)


def test_times_lie_between_measured_ones() -> None:
    times = StepTimes()
    assert times.expect(4, drafted=True) is None
    times.observe(4, False, 1.0)
    times.observe(12, True, 5.0)
    assert times.expect(8, drafted=True) == 3.0
    assert times.expect(99, drafted=True) == 5.0
    assert times.expect(2, drafted=True) == 5.0
    assert times.expect(8, drafted=False) == 1.0


def test_the_first_step_is_plain_and_the_second_drafts_all() -> None:
    controller = DraftLength(7)
    assert controller.choose(["a", "b"]) == {"a": 0, "b": 0}
    controller.times.observe(2, False, 1.0)
    assert controller.choose(["a", "b"]) == {"a": 7, "b": 7}


def taught() -> DraftLength:
    """Knows that a plain step of two takes 1, one with 14 drafts 2.4."""
    controller = DraftLength(7)
    controller.times.observe(2, False, 1.0)
    controller.times.observe(3, True, 1.1)
    controller.times.observe(16, True, 2.4)
    return controller


def test_requests_of_one_step_get_lengths_of_their_own() -> None:
    controller = taught()
    for _ in range(100):
        controller.observe("good", 7, 7)
        controller.observe("bad", 7, 0)
    lengths = controller.choose(["good", "bad"])
    assert lengths == {"good": 7, "bad": 0}


def test_a_finished_request_is_forgotten_and_a_new_one_starts_as_most_do() -> None:
    controller = taught()
    for _ in range(20):
        controller.observe("bad", 7, 0)
    for _ in range(600):
        controller.observe("good", 7, 7)
    assert controller.choose(["good", "bad"])["bad"] == 0
    controller.finish("bad")
    assert controller.choose(["good", "bad"])["bad"] > 4


def test_confidence_of_the_draft_counts_before_what_was_measured() -> None:
    controller = taught()
    for name in ("a", "b"):
        for _ in range(100):
            controller.observe(name, 7, 3)
    lengths = controller.choose(["a", "b"], {"a": [0.99] * 7, "b": [0.99, 0.01, 0.99, 0.99, 0.99, 0.99, 0.99]})
    assert lengths == {"a": 7, "b": 1}


def test_a_request_without_drafts_tries_again_and_comes_back() -> None:
    controller = taught()
    for _ in range(300):
        controller.observe("a", 7, 0)
        controller.observe("b", 7, 0)
    lengths = [controller.choose(["a", "b"])["a"] for _ in range(60)]
    assert set(lengths) == {0, 1}
    assert lengths.count(1) <= 8
    for _ in range(300):
        controller.observe("a", 1, 1)
    assert controller.choose(["a", "b"])["a"] > 1


@pytest.mark.parametrize("tokens", KINDS.values(), ids=KINDS)
def test_the_simulation_gives_the_published_tokens_a_step(tokens: float) -> None:
    rate = acceptance(tokens)
    assert sum(rate**place for place in range(MOST + 1)) == pytest.approx(tokens, abs=1e-6)


def test_the_simulation_costs_what_was_measured() -> None:
    for batch, (plain, whole) in STEPS.items():
        assert cost(batch, 0) == plain
        assert cost(batch, MOST * batch) == pytest.approx(whole)


@pytest.mark.parametrize("batch", STEPS)
@pytest.mark.parametrize("kind", [*KINDS, "mix"])
def test_near_the_best_fixed_length_on_each_and_above_all_on_the_mix(batch: int, kind: str) -> None:
    server = Server(batch, mixes(48, 0)[kind], 500, 0)
    best = max(server.rate(length) for length in range(MOST + 1))
    assert server.rate(None) > (1.0 if kind == "mix" else 0.97) * best
