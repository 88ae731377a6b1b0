import json
from typing import Any, NamedTuple

import pytest

from tests.chat.bodies import call, result
from vllm_kimi_k3.chat.history import read_messages
from vllm_kimi_k3.chat.scope import RequestScope, tenant_of
from vllm_kimi_k3.chat.thinking import Outcome, ThinkingStore, conversation_of, generated_turn, turn_keys

ANNA = tenant_of([(b"authorization", b"Bearer anna")])
BERT = tenant_of([(b"Authorization", b"Bearer bert")])
USER = {"role": "user", "content": "What is 6 times 7?"}
AGAIN = {"role": "user", "content": "And 6 times 8?"}
ANSWER = {"role": "assistant", "content": "42"}


class Generated(NamedTuple):
    """A turn as the server made it; calls are (id, name, arguments)."""

    reasoning: str
    content: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()


def generate(store: ThinkingStore, tenant: bytes, history: list[dict[str, Any]], made: Generated) -> None:
    """Store a turn that was generated after `history`."""
    conversation = conversation_of(tenant, read_messages(history))
    store.put(turn_keys(tenant, conversation, generated_turn(made.content, made.calls)), made.reasoning)


def thoughts(store: ThinkingStore, tenant: bytes, history: list[dict[str, Any]]) -> list[str]:
    return [m.reasoning for m in store.restore(tenant, read_messages(history)) if m.role == "assistant"]


PLAIN = Generated("six sevens", "42")
CALLED = Generated("ask the tool", calls=(("call_1", "times", '{"a": 6, "b": [7.0]}'),))


@pytest.fixture
def counted() -> list[Outcome]:
    return []


@pytest.fixture
def store(counted: list[Outcome]) -> ThinkingStore:
    return ThinkingStore(1 << 20, counted.append)


def test_dropped_thinking_comes_back(store: ThinkingStore, counted: list[Outcome]) -> None:
    generate(store, ANNA, [USER], PLAIN)
    assert thoughts(store, ANNA, [USER, ANSWER, AGAIN]) == ["six sevens"]
    assert counted == [Outcome.STORED, Outcome.RESTORED]


def test_thinking_that_was_sent_stays(store: ThinkingStore) -> None:
    generate(store, ANNA, [USER], PLAIN)
    assert thoughts(store, ANNA, [USER, ANSWER | {"reasoning": "mine"}, AGAIN]) == ["mine"]


def test_blanks_at_the_ends_do_not_matter(store: ThinkingStore) -> None:
    generate(store, ANNA, [USER], PLAIN)
    assert thoughts(store, ANNA, [USER, ANSWER | {"content": " 42\n"}]) == ["six sevens"]


OTHERS: dict[str, list[dict[str, Any]]] = {
    "other-question": [USER | {"content": "What is 40 plus 2?"}, ANSWER],
    "message-more": [{"role": "system", "content": "Be brief."}, USER, ANSWER],
    "other-answer": [USER, ANSWER | {"content": "43"}],
    "other-role": [USER | {"role": "system"}, ANSWER],
    "other-name": [USER | {"name": "eve"}, ANSWER],
    "image": [
        USER | {"content": [{"type": "text", "text": USER["content"]}, {"type": "image_url", "image_url": "a"}]},
        ANSWER,
    ],
}


@pytest.mark.parametrize("history", OTHERS.values(), ids=OTHERS)
def test_another_conversation_gets_nothing(
    store: ThinkingStore, counted: list[Outcome], history: list[dict[str, Any]]
) -> None:
    generate(store, ANNA, [USER], PLAIN)
    assert thoughts(store, ANNA, history) == [""]
    assert counted == [Outcome.STORED, Outcome.UNKNOWN]


def test_another_key_gets_nothing(store: ThinkingStore) -> None:
    generate(store, ANNA, [USER], PLAIN)
    generate(store, ANNA, [USER], CALLED)
    assert thoughts(store, BERT, [USER, ANSWER]) == [""]
    assert thoughts(store, BERT, [{"role": "assistant", "tool_calls": [call("call_1", "times", "{}")]}]) == [""]


def test_a_call_id_is_enough(store: ThinkingStore) -> None:
    """A client may shorten what came before; nobody else has this id."""
    generate(store, ANNA, [USER], CALLED)
    turn = {"role": "assistant", "content": "changed", "tool_calls": [call("call_1", "times", "{}")]}
    assert thoughts(store, ANNA, [turn, result("call_1", "42")]) == ["ask the tool"]


@pytest.mark.parametrize("arguments", ['{"b":[7.0],"a":6}', {"a": 6, "b": [7.0]}], ids=["respelled", "object"])
def test_a_turn_with_other_ids_is_known_by_its_calls(store: ThinkingStore, arguments: object) -> None:
    generate(store, ANNA, [USER], CALLED)
    turn = {"role": "assistant", "tool_calls": [call("theirs", "times", arguments)]}
    assert thoughts(store, ANNA, [USER, turn]) == ["ask the tool"]


def test_a_later_turn_knows_the_whole_conversation(store: ThinkingStore) -> None:
    generate(store, ANNA, [USER], PLAIN)
    generate(store, ANNA, [USER, ANSWER, AGAIN], Generated("six eights", "48"))
    history = [USER, ANSWER, AGAIN, {"role": "assistant", "content": "48"}]
    assert thoughts(store, ANNA, history) == ["six sevens", "six eights"]
    assert thoughts(store, ANNA, history[2:]) == [""]


def test_a_request_knows_its_conversation_only_if_it_has_one() -> None:
    first, second = (conversation_of(ANNA, read_messages([message])) for message in (USER, AGAIN))
    scope = RequestScope(ANNA)
    assert scope.conversation is None
    scope.rendered(first)
    scope.rendered(first)
    assert scope.conversation == first
    scope.rendered(second)
    assert scope.conversation is None


def test_a_request_that_continues_a_turn_has_no_conversation() -> None:
    scope = RequestScope(ANNA)
    scope.rendered(None)
    assert scope.conversation is None


def test_the_bound_holds_and_the_least_used_goes(counted: list[Outcome]) -> None:
    store = ThinkingStore(6000, counted.append)
    for number in range(3):
        store.put([bytes([number])], "x" * 300)
        store.get([b"\0"])
    assert store.bytes_held <= 6000
    assert store.get([b"\0"]) and store.get([b"\2"])
    store.put([b"\3"], "x" * 300)
    assert store.get([b"\0"]) is None or store.get([b"\2"]) is None
    assert Outcome.EVICTED in counted


def test_too_large_for_the_store_is_not_stored(store: ThinkingStore) -> None:
    store.put([b"k"], "x" * (1 << 20))
    assert store.get([b"k"]) is None and store.bytes_held == 0


def test_keys_hold_no_text(store: ThinkingStore) -> None:
    generate(store, ANNA, [USER], CALLED)
    keys = b"".join(store._numbers)
    assert b"anna" not in keys and b"call_1" not in keys and json.dumps(USER).encode() not in keys
