"""KDA in chunks against the recurrence, and both against the model's reference."""

import pytest
import torch

from vllm_kimi_k3 import reference
from vllm_kimi_k3.ops.kda.chunk import kda_prefill_chunked
from vllm_kimi_k3.ops.kda.reference import kda_decode_reference, kda_prefill_reference, log_decay

HEADS, DIM, BOUND = 3, 64, -5.0
PAGES = 40


def inputs(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random inputs whose decays cover the real range, -5 to nearly 0 a step."""
    torch.manual_seed(seed)
    return {
        "q": torch.randn(tokens, HEADS, DIM),
        "k": torch.randn(tokens, HEADS, DIM),
        "v": torch.randn(tokens, HEADS, DIM),
        "gate": 4 * torch.randn(tokens, HEADS, DIM),
        "beta": torch.randn(tokens, HEADS),
        "a_log": 2 * torch.rand(HEADS),
        "dt_bias": 2 * torch.randn(HEADS * DIM),
    }


def offsets(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


@pytest.mark.parametrize(
    "lengths",
    [[1], [2], [15], [16], [17], [63], [64], [65], [130], [0, 5, 0], [1, 130, 16, 300, 33]],
    ids=lambda lengths: "+".join(map(str, lengths)),
)
def test_chunks_equal_the_recurrence(lengths: list[int]) -> None:
    given = inputs(sum(lengths))
    assert log_decay(given["gate"], given["a_log"], given["dt_bias"], BOUND).min() < -4.99
    states = torch.randn(PAGES, HEADS, DIM, DIM)
    expected_states = states.clone()
    last = len(lengths) - 1
    exports = [(last, count, 20 + i) for i, count in enumerate((1, 16, 64, 100, 128)) if count <= lengths[last]]
    where = (offsets(lengths), list(range(len(lengths))), [i % 2 == 0 for i in range(len(lengths))], exports)
    expected = kda_prefill_reference(**given, lower_bound=BOUND, states=expected_states, **named(where))
    out = kda_prefill_chunked(**given, lower_bound=BOUND, states=states, **named(where))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states, expected_states, rtol=1e-5, atol=1e-5)


def named(where: tuple[list[int], list[int], list[bool], list[tuple[int, int, int]]]) -> dict[str, object]:
    return dict(zip(("starts", "pages", "fresh", "exports"), where, strict=True))


def test_an_exported_state_continues_to_the_same_end() -> None:
    given = inputs(300)
    states = torch.zeros(PAGES, HEADS, DIM, DIM)
    whole = kda_prefill_chunked(
        **given, lower_bound=BOUND, states=states, starts=[0, 300], pages=[0], fresh=[True], exports=[(0, 128, 1)]
    )
    rest = {name: value[128:] if value.shape[:1] == (300,) else value for name, value in given.items()}
    out = kda_prefill_chunked(
        **rest, lower_bound=BOUND, states=states, starts=[0, 172], pages=[1], fresh=[False], exports=[]
    )
    torch.testing.assert_close(out, whole[128:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)


def test_a_fresh_sequence_ignores_what_its_page_holds() -> None:
    given = inputs(20)
    clean, dirty = torch.zeros(2, HEADS, DIM, DIM), torch.full((2, HEADS, DIM, DIM), float("nan"))
    place = {"lower_bound": BOUND, "starts": [0, 20], "pages": [1], "fresh": [True], "exports": []}
    expected = kda_prefill_chunked(**given, states=clean, **place)
    torch.testing.assert_close(kda_prefill_chunked(**given, states=dirty, **place), expected)
    torch.testing.assert_close(dirty[1], clean[1])


def test_decoding_equals_the_recurrence() -> None:
    given = inputs(5)
    states = torch.randn(PAGES, HEADS, DIM, DIM)
    expected_states = states.clone()
    pages = [7, 3, 11, 0, 5]
    expected = kda_prefill_reference(
        **given,
        lower_bound=BOUND,
        states=expected_states,
        starts=list(range(6)),
        pages=pages,
        fresh=[False] * 5,
        exports=[],
    )
    out = kda_decode_reference(**given, lower_bound=BOUND, states=states, pages=torch.tensor(pages))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(states, expected_states)


def test_the_operation_is_the_models_reference() -> None:
    given = inputs(100)
    states = torch.zeros(1, HEADS, DIM, DIM)
    out = kda_prefill_chunked(
        **given, lower_bound=BOUND, states=states, starts=[0, 100], pages=[0], fresh=[True], exports=[]
    )
    q, k = reference.normalise_qk(given["q"], given["k"])
    decay = reference.log_decay(given["gate"], given["a_log"], given["dt_bias"], BOUND)
    expected, state = reference.kda_recurrent(
        q, k, given["v"], decay, torch.sigmoid(given["beta"]), torch.zeros(HEADS, DIM, DIM)
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(states[0], state, rtol=1e-5, atol=1e-5)
