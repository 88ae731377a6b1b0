"""The miniature's draft: its layout, what it learns from, and the fast count of accepted guesses against the slow."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_kimi_k3.chat.tokens import SpecialTokens
from vllm_kimi_k3.dspark.reference import DraftConfig, MlaDraft, load_draft, speculate
from vllm_kimi_k3.nano.checkpoint import build
from vllm_kimi_k3.nano.draft import BLOCK, DraftShape, draft_config, draft_tensors, starting_draft, write_draft
from vllm_kimi_k3.nano.draft_exam import accepted
from vllm_kimi_k3.nano.train_draft import cut, load_target
from vllm_kimi_k3.reference import KimiK3, load_checkpoint


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nano") / "built", 0)


@pytest.fixture(scope="module")
def target(nano: Path) -> KimiK3:
    return load_checkpoint(nano, torch.float32)


def test_written_in_the_published_layout(target: KimiK3, tmp_path: Path) -> None:
    shape = DraftShape()
    weights = starting_draft(shape, target.weight("model.embed_tokens.weight"), torch.Generator().manual_seed(0))
    path = write_draft(tmp_path / "draft", shape, weights)
    stored = load_file(path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == {
        name: spec.shape for name, spec in draft_tensors(shape).items()
    }
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    config = json.loads((path / "config.json").read_text())
    special = SpecialTokens.from_ranks(shape.target.ranks)
    assert special.names[config["mask_token_id"]] == "<|reserved_token_163837|>"
    draft = load_draft(path, target)
    assert torch.equal(draft.embeddings, target.weight("model.embed_tokens.weight"))


def test_a_missing_tensor_is_named(target: KimiK3, tmp_path: Path) -> None:
    shape = DraftShape()
    weights = starting_draft(shape, target.weight("model.embed_tokens.weight"), torch.Generator().manual_seed(0))
    del weights["layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        write_draft(tmp_path / "draft", shape, weights)


def _knowing(target: KimiK3, pairs: list[tuple[int, int]]) -> MlaDraft:
    """A draft whose Markov head has learned that the second of each pair follows the first."""
    shape = DraftShape()
    generator = torch.Generator().manual_seed(1)
    weights = starting_draft(shape, target.weight("model.embed_tokens.weight"), generator)
    first = torch.nn.functional.normalize(torch.randn(shape.target.vocab_size, shape.markov_rank, generator=generator))
    second = torch.zeros_like(first)
    for before, after in pairs:
        second[after] += 60 * first[before]
    weights |= {"markov_head.markov_w1.weight": first, "markov_head.markov_w2.weight": second}
    head, embeddings = target.weight("lm_head.weight"), target.weight("model.embed_tokens.weight")
    return MlaDraft(DraftConfig.from_dict(draft_config(shape)), weights, embeddings, head, torch.float32)


def _plain(target: KimiK3, prompt: list[int], count: int) -> list[int]:
    state, answer, ids = target.new_state(), list[int](), prompt
    for _ in range(count):
        answer.append(int(target.forward(torch.tensor(ids), state)[-1].argmax()))
        ids = answer[-1:]
    return answer


@torch.no_grad()
def test_fast_count_equals_the_loop(nano: Path, target: KimiK3) -> None:
    prompts = [[5, 9, 200, 31, 7], list(range(300, 340))]
    plain = [_plain(target, prompt, 40) for prompt in prompts]
    pairs = list(zip(plain[0], plain[0][1:], strict=False)) + list(zip(plain[1], plain[1][1:], strict=False))
    draft = _knowing(target, [pair for number, pair in enumerate(pairs) if number % 11])
    # The last token of the second answer ends it, so that its last step guesses past the end.
    stop = plain[1][-1]
    plain = [answer[: answer.index(stop) + 1] if stop in answer else answer for answer in plain]
    slow = [speculate(target, draft, prompt, stop, 40, BLOCK) for prompt in prompts]
    assert [answer for answer, _ in slow] == plain
    steps = [found for _, found in slow]
    assert {0, BLOCK} <= {n for found in steps for n in found}
    assert accepted(load_target(nano, torch.device("cpu")), draft, prompts, plain, 1024) == steps


def test_a_slot_counts_while_the_dialogue_goes_as_the_target_would() -> None:
    ids = torch.tensor([[10, 11, 12, 13, 14, 15, 16, 17]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]])
    # What the target says after each token; it would have said 99 after 12.
    chosen = torch.tensor([[11, 12, 99, 14, 15, 16, 17, 18]])
    lesson = cut(ids, mask, chosen, torch.tensor([[1, 3, 6, 0]]), 3)
    assert lesson.anchors.tolist() == [[11, 13, 16, 10]]
    assert lesson.before.tolist()[0][:2] == [[11, 12, 13], [13, 14, 15]]
    assert lesson.labels.tolist()[0][:2] == [[12, 99, 14], [14, 15, 16]]
    # The guess 99 itself counts and nothing after it; 16 is not the assistant's; 16 and 10 anchor nothing.
    assert lesson.weight.tolist() == [[[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]]
