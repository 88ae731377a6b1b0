"""What the exam counts as right."""

from dataclasses import replace

import pytest

from vllm_kimi_k3.nano.exam import Question, Reply, questions, right


def due(calls: int, thinks: bool = True) -> Question:
    """A grammar question whose right answer has so many calls."""
    for question in questions("grammar", 400, seed=3):
        if len(question.expected.calls) == calls and (question.dialogue.style.effort != "off") == thinks:
            return question
    raise AssertionError(f"no question with {calls} calls")


def perfect(question: Question) -> Reply:
    expected = question.expected
    return Reply(expected.content, expected.reasoning, [(call.name, call.arguments) for call in expected.calls])


@pytest.mark.parametrize("row", ["grammar", "tools", "tool results", "recall to 2,000", "arithmetic", "lists"])
def test_the_expected_reply_is_right_and_a_cut_one_is_not(row: str) -> None:
    for question in questions(row, 30, seed=5):
        assert right(question, perfect(question))
        assert not right(question, replace(perfect(question), finished=False))


def test_grammar_wants_thinking_only_where_it_is_on() -> None:
    on, off = due(0), due(0, thinks=False)
    assert not right(on, replace(perfect(on), reasoning=""))
    assert not right(off, replace(perfect(off), reasoning="hm"))


def test_grammar_wants_an_answer_or_calls_with_an_object() -> None:
    question = due(1)
    name, arguments = perfect(question).calls[0]
    assert not right(question, replace(perfect(question), calls=[], content=""))
    # Which tool is called, declared or not, is the tools row's question.
    other = replace(perfect(question), calls=[("nobody", arguments)])
    assert right(question, other)
    assert not right(replace(question, row="tools"), other)
    assert not right(question, replace(perfect(question), calls=[(name, "not an object")]))


def test_grammar_wants_as_many_parallel_calls_as_are_due_but_leaves_the_decision_to_the_tools_row() -> None:
    question = due(2)
    assert not right(question, replace(perfect(question), calls=perfect(question).calls[:1]))
    refusal = Reply("I have no tool for that.", "No tool fits.")
    assert right(question, refusal)
    assert not right(replace(question, row="tools"), refusal)
