"""What keeps a draft from guessing for a target is named, field by field."""

from typing import Any

import pytest

from tests.dspark.conftest import INFERACT, REDHAT, TINY_GQA, TINY_MLA
from vllm_kimi_k3.dspark.contract import block_of, misfits, taps_of
from vllm_kimi_k3.nano.draft import DraftShape, draft_config
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.plan.release import TEXT

YARN = TINY_MLA["rope_parameters"]
LAYER = TINY_GQA["transformer_layer_config"]


def test_published_drafts_fit_k3() -> None:
    assert misfits(INFERACT, TEXT, 7) == []
    assert misfits(REDHAT, TEXT, 8) == []
    assert misfits(draft_config(DraftShape()), Shape(), 7) == []


def test_taps_of_both_layouts_count_alike() -> None:
    assert taps_of(INFERACT) == (2, 23, 47, 71, 89)
    assert taps_of(REDHAT) == (23, 47, 71, 87, 91)


@pytest.mark.parametrize(
    ("config", "block"),
    [(INFERACT, 7), (REDHAT, 8), (REDHAT | {"sample_from_anchor": False}, 7), (INFERACT | {"block_size": 5}, 5)],
    ids=["mla", "gqa", "anchor guesses nothing", "named block"],
)
def test_the_block_that_a_draft_was_trained_for(config: dict[str, Any], block: int) -> None:
    assert block_of(config) == block
    assert misfits(config, TEXT, block) == []
    assert [m.field for m in misfits(config, TEXT, block + 1)] == ["block"]


MLA = {
    "width": ({"hidden_size": 64}, "hidden_size"),
    "width left out": ({"hidden_size": None}, "hidden_size"),
    "width of the taps": ({"target_hidden_size": 64}, "target_hidden_size"),
    "vocabulary": ({"vocab_size": 301}, "vocab_size"),
    "vocabulary of the guesses": ({"draft_vocab_size": 200}, "draft_vocab_size"),
    "depth of the target": ({"target_num_hidden_layers": 9}, "target_num_hidden_layers"),
    "mask that is text": ({"mask_token_id": 43}, "mask_token_id"),
    "mask outside": ({"mask_token_id": 300}, "mask_token_id"),
    "mask left out": ({"mask_token_id": None}, "mask_token_id"),
    "eps": ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
    "eps left out": ({"rms_norm_eps": None}, "rms_norm_eps"),
    "no taps": ({"target_layer_ids": []}, "target_layer_ids"),
    "tap beyond": ({"target_layer_ids": [0, 3, 8]}, "target_layer_ids"),
    "tap below": ({"target_layer_ids": [-1, 3, 5]}, "target_layer_ids"),
    "taps in disorder": ({"target_layer_ids": [3, 0, 5]}, "target_layer_ids"),
    "a tap twice": ({"target_layer_ids": [0, 0, 5]}, "target_layer_ids"),
    "taps miscounted": ({"num_target_layers": 5}, "num_target_layers"),
    "head of another type": ({"markov_head_type": "rnn"}, "markov_head_type"),
    "no rank": ({"markov_rank": 0}, "markov_rank"),
    "confidence without markov": ({"confidence_head_with_markov": False}, "confidence_head_with_markov"),
    "without positions": ({"mla_use_nope": True}, "mla_use_nope"),
    "gated": ({"mla_use_output_gate": True}, "mla_use_output_gate"),
    "no rope": ({"rope_parameters": None}, "rope_parameters"),
    "rope of another type": ({"rope_parameters": YARN | {"rope_type": "linear"}}, "rope_parameters"),
    "rope without a field": ({"rope_parameters": YARN | {"beta_fast": None}}, "rope_parameters"),
    "rope that is too short": ({"rope_parameters": YARN | {"factor": 16}}, "rope_parameters.factor"),
    "another model": ({"model_type": "qwen3"}, "architectures"),
}
GQA = {
    "tap beyond": ({"aux_hidden_state_layer_ids": [1, 4, 9]}, "aux_hidden_state_layer_ids"),
    "tap below": ({"aux_hidden_state_layer_ids": [0, 4, 8]}, "aux_hidden_state_layer_ids"),
    "nested width": ({"transformer_layer_config": LAYER | {"hidden_size": 64}}, "hidden_size"),
    "odd head": ({"transformer_layer_config": LAYER | {"head_dim": 7}}, "head_dim"),
    "heads that do not divide": (
        {"transformer_layer_config": LAYER | {"num_key_value_heads": 4}},
        "num_key_value_heads",
    ),
    "no window": ({"transformer_layer_config": LAYER | {"sliding_window": None}}, "sliding_window"),
    "full layers": ({"transformer_layer_config": LAYER | {"layer_types": ["full_attention"]}}, "layer_types"),
    "no rope": ({"transformer_layer_config": LAYER | {"rope_theta": None}}, "rope_theta"),
    "stretched rope": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters"),
}


@pytest.mark.parametrize("name", MLA)
def test_an_mla_draft_that_does_not_fit(name: str, tiny_target: Any) -> None:
    changes, field = MLA[name]
    assert misfits(TINY_MLA, tiny_target, 7) == []
    found = misfits(TINY_MLA | changes, tiny_target, 7)
    assert [m.field for m in found] == [field]
    assert str(found[0]).startswith(f"draft config {field} is {found[0].value!r}, expected ")


@pytest.mark.parametrize("name", GQA)
def test_a_gqa_draft_that_does_not_fit(name: str, tiny_target: Any) -> None:
    changes, field = GQA[name]
    assert misfits(TINY_GQA, tiny_target, 8) == []
    assert [m.field for m in misfits(TINY_GQA | changes, tiny_target, 8)] == [field]


def test_all_that_is_wrong_is_said_at_once(tiny_target: Any) -> None:
    found = misfits(TINY_MLA | {"hidden_size": 64, "mask_token_id": 1}, tiny_target, 9)
    assert [m.field for m in found] == ["hidden_size", "mask_token_id", "block"]
