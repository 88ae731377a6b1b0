"""Both published layouts: their tensors, and the paged drafts against the plain ones."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.dspark.conftest import INFERACT, REDHAT, TINY_GQA, TINY_MLA, random_weights
from vllm_kimi_k3.dspark.gqa_reference import GqaConfig, GqaDraft, load_gqa_draft
from vllm_kimi_k3.dspark.paged import PagedDraft, page_slots
from vllm_kimi_k3.dspark.paged_gqa import PagedGqaDraft
from vllm_kimi_k3.dspark.paged_mla import PagedMlaDraft
from vllm_kimi_k3.dspark.reference import DraftConfig, MlaDraft
from vllm_kimi_k3.dspark.weights import DraftError, read, tensors
from vllm_kimi_k3.nano.draft import DraftShape, draft_config, draft_tensors
from vllm_kimi_k3.plan.release import DRAFTS

TINY = {"mla": TINY_MLA, "gqa": TINY_GQA}
PAGE = 4


def _pair(kind: str) -> tuple[Any, PagedDraft]:
    """The plain and the paged draft over the same weights."""
    weights = random_weights(TINY[kind])
    if kind == "gqa":
        shared = weights["embed_tokens.weight"], weights["lm_head.weight"]
        plain = GqaDraft(GqaConfig.from_dict(TINY_GQA), weights, *shared, torch.float32)
        return plain, PagedGqaDraft(TINY_GQA, weights, torch.float32)
    shared = torch.randn(2, 300, 48, generator=torch.Generator().manual_seed(9)).unbind(0)
    arguments = weights, *shared, torch.float32
    return MlaDraft(DraftConfig.from_dict(TINY_MLA), *arguments), PagedMlaDraft(TINY_MLA, *arguments)


@pytest.mark.parametrize(
    ("config", "name", "count"),
    [(INFERACT, "Inferact/Kimi-K3-DSpark", 67), (REDHAT, "RedHatAI/Kimi-K3-speculator.dspark", 64)],
    ids=["mla", "gqa"],
)
def test_published_tensors_are_all_there_to_the_byte(config: dict[str, Any], name: str, count: int) -> None:
    shapes = tensors(config)
    assert len(shapes) == count
    assert 2 * sum(math.prod(shape) for shape in shapes.values()) == DRAFTS[name].stored_bytes


def test_the_miniatures_draft_has_the_same_layout() -> None:
    own = {name: spec.shape for name, spec in draft_tensors(DraftShape()).items() if name != "embed_tokens.weight"}
    assert tensors(draft_config(DraftShape())) == own


@pytest.mark.parametrize("kind", TINY)
@torch.no_grad()
def test_paged_equals_plain_in_a_batch_of_unlike_contexts(kind: str) -> None:
    plain, paged = _pair(kind)
    generator = torch.Generator().manual_seed(2)
    lengths, width = [1, 21, 10, 0], 5
    pages = torch.randperm(4 * 8, generator=generator).view(4, 8).int()
    caches = [torch.full((32, PAGE, *paged.row_shape), float("nan")) for _ in range(2)]
    anchors, contexts = torch.tensor([5, 17, 200, 3]), []
    for row, length in enumerate(lengths):
        taps = [torch.randn(length, 48, generator=generator) for _ in range(3)]
        contexts.append(taps)
        # As a server does it: some tokens a step, and a refused guess's row that is overwritten.
        for part in torch.arange(length).split(3):
            slots = page_slots(pages[row : row + 1], part.unsqueeze(0), PAGE).flatten()
            paged.store(paged.context([tap[part] for tap in taps]) + 1, part, slots, caches)
            paged.store(paged.context([tap[part] for tap in taps]), part, slots, caches)
    found = paged.blocks(anchors, torch.tensor(lengths), width, caches, pages)
    for row, length in enumerate(lengths):
        context = plain.context([tap.unsqueeze(0) for tap in contexts[row]])
        anchor = anchors[row].view(1, 1)
        expected = plain.blocks(context, anchor, torch.tensor([[length]]), width)
        torch.testing.assert_close(found[row], expected[0, 0], rtol=0, atol=2e-5)
        before = torch.tensor([7, 8, 9, 10, 11])
        markov = plain.markov(before)
        torch.testing.assert_close(
            paged.logits(found[row]) + paged.bias(paged.markov(before)),
            plain.logits(expected[0, 0]) + plain.bias(markov),
            rtol=0,
            atol=1e-4,
        )
        odds = paged.confidence(found[row], paged.markov(before))
        torch.testing.assert_close(odds, plain.confidence(expected[0, 0], markov), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", TINY)
@torch.no_grad()
def test_a_row_that_is_not_to_be_written_leaves_the_pages_alone(kind: str) -> None:
    _, paged = _pair(kind)
    caches = [torch.zeros(2, PAGE, *paged.row_shape) for _ in range(2)]
    paged.store(torch.randn(2, 48), torch.tensor([0, 1]), torch.tensor([3, -1]), caches)
    written = caches[0].flatten(0, 1).flatten(1).abs().sum(1) > 0
    assert written.tolist() == [False, False, False, True, False, False, False, False]


def _blocks(draft: GqaDraft, context: torch.Tensor, guesses: torch.Tensor) -> torch.Tensor:
    return draft.blocks(context, guesses, torch.tensor([[context.shape[1]]]), 4)


@torch.no_grad()
def test_the_window_ends_where_it_should() -> None:
    plain, _ = _pair("gqa")
    context, anchor = torch.randn(1, 20, 48, generator=torch.Generator().manual_seed(4)), torch.tensor([[8]])
    base = _blocks(plain, context, anchor)
    for row, seen in ((10, False), (11, True)):
        changed = context.clone()
        changed[0, row] += 3
        assert torch.equal(_blocks(plain, changed, anchor), base) is not seen


@pytest.mark.parametrize(("kind", "sees"), [("mla", True), ("gqa", False)])
@torch.no_grad()
def test_only_the_mla_draft_sees_later_slots(kind: str, sees: bool) -> None:
    plain, _ = _pair(kind)
    context, anchor, at = torch.randn(1, 6, 48), torch.tensor([[8]]), torch.tensor([[6]])
    short, long = (plain.blocks(context, anchor, at, width)[0, 0, 0] for width in (2, 6))
    assert torch.allclose(short, long, atol=1e-5) is not sees


def _write(path: Path, weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_directory_is_read_and_its_faults_are_named(tmp_path: Path) -> None:
    weights = random_weights(TINY_GQA)
    draft = load_gqa_draft(_write(tmp_path, weights, TINY_GQA), torch.float32)
    assert draft.config.target_layer_ids == (0, 3, 7)
    assert draft.weights.keys() == weights.keys()
    with pytest.raises(DraftError, match=r"1 tensors are missing, the first is fc\.weight"):
        read(_write(tmp_path, {k: v for k, v in weights.items() if k != "fc.weight"}, TINY_GQA), TINY_GQA)
    with pytest.raises(DraftError, match=r"norm.weight has the shape \(3,\), its config.json says \(48,\)"):
        read(_write(tmp_path, weights | {"norm.weight": torch.zeros(3)}, TINY_GQA), TINY_GQA)
    with pytest.raises(DraftError, match="extra is no tensor"):
        read(_write(tmp_path, weights | {"extra": torch.zeros(3)}, TINY_GQA), TINY_GQA)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DraftError, match=r"no \.safetensors file"):
        read(tmp_path, TINY_GQA)


def test_an_embedding_that_is_the_targets_is_left_in_the_file(tmp_path: Path) -> None:
    weights = random_weights(TINY_MLA)
    found = read(_write(tmp_path, weights | {"embed_tokens.weight": torch.zeros(300, 48)}, TINY_MLA), TINY_MLA)
    assert found.keys() == weights.keys()
