"""Where states are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kimi_k3.cache.policy import Kind, Marks, floor_to, message_ends, rungs, system_end, value, wanted

MARKS = Marks.of_vocabulary(1256)
SYSTEM, USER, ASSISTANT = 7, 8, 9


def message(role: int, body: int) -> list[int]:
    """A message of ``body`` + 6 tokens as the chat format spells it."""
    return [MARKS.open, 1, 2, 3, role, *([5] * body), MARKS.end_of_msg]


def test_marks_of_k3() -> None:
    assert Marks.of_vocabulary(163_840) == Marks(open=163_587, end_of_msg=163_586)


def test_message_ends_counts_tokens_up_to_and_with_the_mark() -> None:
    tokens = message(SYSTEM, 4) + message(USER, 1)
    assert list(message_ends(tokens, MARKS)) == [10, 17]
    assert list(message_ends(tokens, MARKS, start=10)) == [17]


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        ([(SYSTEM, 4), (USER, 3)], 10),
        ([(SYSTEM, 4), (SYSTEM, 0), (USER, 3), (SYSTEM, 9)], 16),
        ([(USER, 4), (ASSISTANT, 3), (USER, 3)], 10),
        ([(SYSTEM, 4)], 10),
        ([], 0),
    ],
    ids=["one system message", "tools and system, later system ignored", "no system", "nothing else", "empty"],
)
def test_system_end(messages: list[tuple[int, int]], end: int) -> None:
    assert system_end([token for role, body in messages for token in message(role, body)], MARKS) == end


def test_raw_text_has_no_system_block() -> None:
    assert system_end([5] * 1000, MARKS) == 0


@pytest.mark.parametrize("size", [150, 300, 700, 768, 1500, 4000, 6000])
def test_end_of_system_block_is_kept(size: int) -> None:
    tokens = message(SYSTEM, size - 6) + message(USER, 400)
    found = wanted(tokens, len(tokens), 0, 128, MARKS)
    assert found[floor_to(size, 128)] is Kind.SYSTEM


def test_dense_messages_keep_only_the_last_ones() -> None:
    tokens = message(SYSTEM, 500) + message(USER, 150) * 40
    kinds = list(wanted(tokens, len(tokens), 0, 128, MARKS).values())
    assert kinds.count(Kind.MESSAGE) <= 3


def test_without_tokens_the_length_still_gives_a_ladder_and_an_end() -> None:
    assert wanted(None, 3000, 0, 128, MARKS) == {
        512: Kind.RUNG,
        1024: Kind.RUNG,
        2048: Kind.RUNG,
        2944: Kind.PROMPT,
    }


def test_lookahead_moves_the_last_boundary_back() -> None:
    assert max(wanted(None, 1025, 0, 128, MARKS)) == 1024
    assert max(wanted(None, 1025, 0, 128, MARKS, lookahead=64)) == 896


def test_two_reasons_keep_the_higher_kind() -> None:
    assert wanted(None, 513, 0, 128, MARKS, fork=513)[512] is Kind.FORK


@given(st.integers(1000, 200_000), st.sampled_from([64, 128]))
def test_a_rung_lies_past_half_of_any_fork(fork: int, unit: int) -> None:
    assert any(2 * rung >= fork for rung in rungs(0, fork + 1, unit) if rung <= fork)


@given(
    st.lists(st.sampled_from([5, MARKS.open, MARKS.end_of_msg]), max_size=3000),
    st.integers(0, 3000),
    st.sampled_from([64, 128]),
    st.integers(0, 4000),
)
def test_boundaries_are_units_between_start_and_the_last_token(
    tokens: list[int], start: int, unit: int, fork: int
) -> None:
    found = wanted(tokens, len(tokens), start, unit, MARKS, fork)
    assert all(boundary % unit == 0 and start < boundary <= len(tokens) - 1 for boundary in found)
    last = floor_to(len(tokens) - 1, unit)
    assert last <= start or last in found
    assert len(found) <= 16


def test_a_state_used_again_outlives_one_that_was_not() -> None:
    once = value(Kind.TURN, 1000, uses=1, superseded=True)
    assert once < value(Kind.TURN, 1000, uses=0, superseded=False)
    assert value(Kind.TURN, 1000, uses=3, superseded=True) > value(Kind.TURN, 1000, uses=1, superseded=False)
    assert value(Kind.RUNG, 1000, 0, superseded=False) < value(Kind.PROMPT, 1000, 0, superseded=False)
    assert value(Kind.PROMPT, 2000, 0, superseded=False) > value(Kind.PROMPT, 1000, 0, superseded=False)
