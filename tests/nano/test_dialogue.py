"""Dialogues as token ids: what is learned, what is not, and that the server would read it back the same."""

import random

import pytest

from vllm_kimi_k3.chat.render import render
from vllm_kimi_k3.chat.tokenizer import K3Tokenizer
from vllm_kimi_k3.nano.batches import CURRICULUM, length_at, load_tokenizer, make_batch, stream
from vllm_kimi_k3.nano.decode import read_reply
from vllm_kimi_k3.nano.dialogue import Encoder, append, converse, start, thinking
from vllm_kimi_k3.nano.exam import TARGETS, Question, Reply, questions, right
from vllm_kimi_k3.nano.tasks import kept
from vllm_kimi_k3.nano.tasks.exchange import Turn


@pytest.fixture(scope="module")
def tokenizer() -> K3Tokenizer:
    return load_tokenizer()


@pytest.fixture(scope="module")
def encoder(tokenizer: K3Tokenizer) -> Encoder:
    return Encoder(tokenizer)


def test_learned_spans_are_the_assistants_messages(encoder: Encoder, tokenizer: K3Tokenizer) -> None:
    for seed in range(30):
        dialogue = converse(random.Random(seed), 700)
        ids, mask = encoder.encode(dialogue)
        enabled = thinking(dialogue.style).enabled
        spans = "".join(map(str, mask)).split("0")
        sizes = [len(span) for span in spans if span]
        assert len(sizes) == sum(dialogue.learned)
        told = [message for message in dialogue.messages if message["role"] == "assistant"]
        at = 0
        for message, size in zip(
            [m for m, learned in zip(told, dialogue.learned, strict=True) if learned], sizes, strict=True
        ):
            at = mask.index(1, at)
            reply = read_reply(tokenizer, ids[at : at + size], enabled)
            assert reply.finished
            assert (reply.reasoning, reply.content) == (message["reasoning"], message["content"])
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
            assert reply.calls == calls
            at += size


def test_a_forgotten_turn_is_no_example(encoder: Encoder, tokenizer: K3Tokenizer) -> None:
    scene, dialogue = start(random.Random(1), "max", 0)
    append(dialogue, kept.name_three(scene), forget=True)
    ids, mask = encoder.encode(dialogue)
    assert not any(mask)
    assert b"I keep" not in b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special)


def test_same_seed_same_dialogue() -> None:
    assert converse(random.Random(5), 900) == converse(random.Random(5), 900)
    assert converse(random.Random(5), 900) != converse(random.Random(6), 900)


@pytest.mark.parametrize("limit", [512, 1024, 4096])
def test_dialogues_fill_their_length(encoder: Encoder, limit: int) -> None:
    sizes = [len(encoder.encode(converse(random.Random(seed), limit))[0]) for seed in range(12)]
    assert limit * 0.6 < sum(sizes) / len(sizes) < limit * 1.2


def test_batches_are_cut_and_padded(encoder: Encoder) -> None:
    batch = make_batch(encoder, 3, 4, 256)
    assert batch.ids.shape == batch.mask.shape == (4, 256)
    for row, length in enumerate(batch.lengths):
        assert not batch.ids[row, length:].any()
        assert not batch.mask[row, length:].any()
    assert batch.mask.any()


def test_lengths_grow_with_the_training() -> None:
    drawn = {begin: {length_at(begin, random.Random(n)) for n in range(200)} for begin, _ in CURRICULUM}
    assert drawn == {begin: set(shares) for begin, shares in CURRICULUM}


def test_a_resumed_stream_goes_on_where_it_stopped() -> None:
    whole = list(stream(1, 0, 3, 512, workers=1))
    rest = list(stream(1, 2, 3, 512, workers=1))
    assert len(whole) == 3
    assert len(rest) == 1
    assert (rest[0].ids == whole[2].ids).all()


def _reply(turn: Turn) -> Reply:
    return Reply(turn.content, turn.reasoning, [(call.name, call.arguments) for call in turn.calls])


@pytest.mark.parametrize("row", TARGETS)
def test_exam_marks(row: str, tokenizer: K3Tokenizer) -> None:
    first, again = questions(row, 3, seed=0), questions(row, 3, seed=0)
    assert first == again
    assert first != questions(row, 3, seed=1)
    for question in first:
        assert question.dialogue.messages[-1]["role"] in ("user", "tool")
        good = _reply(question.expected)
        assert right(question, good)
        good.finished = False
        assert not right(question, good)
        assert not right(question, Reply("No.", "Hm.", [("delete_all", "all of it")] * 9))
        assert not right(question, Reply())


def test_recall_questions_have_the_length_of_their_row(tokenizer: K3Tokenizer) -> None:
    def lengths(row: str) -> list[int]:
        asked = questions(row, 6, seed=0)
        return [len(render(tokenizer, question.dialogue.request(generation=True))) for question in asked]

    assert all(3000 < n < 4500 for n in lengths("recall at 4,000"))
    assert all(5000 < n < 6800 for n in lengths("recall at 6,000"))


def test_dropped_means_that_no_message_tells() -> None:
    def told(question: Question) -> str:
        return " ".join(m["content"] + m.get("reasoning", "") for m in question.dialogue.messages)

    for question in questions("other two, thinking kept", 8, seed=0):
        assert all(word in told(question) for word in question.expected.key.split(" and "))
    for question in questions("other two, thinking dropped", 8, seed=0):
        first = next(m for m in question.dialogue.messages if m["role"] == "assistant")
        assert first["reasoning"] == ""
        assert not any(word in first["content"].strip(".").split(", ") for word in question.expected.key.split(" and "))
