"""Each assumption of the model about its config is checked, and the message names the field."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_k3.config import ConfigError, KimiK3Config, check_config, check_parallel, check_speculation
from vllm_kimi_k3.nano.shape import Shape, k3_config


@pytest.fixture
def fields() -> dict[str, Any]:
    """The nano config, as a dict."""
    return json.loads(json.dumps(k3_config(Shape())))


def check(fields: dict[str, Any]) -> None:
    check_config(KimiK3Config(**fields).text_config)


def test_the_miniature_is_accepted(fields: dict[str, Any]) -> None:
    check(fields)


def test_the_published_config_is_accepted_at_the_recipes_sizes(shared: Path) -> None:
    config = KimiK3Config(**json.loads((shared / "data/checkpoint/config.json").read_text()))
    check_config(config.text_config)
    for size in (1, 8, 16):
        check_parallel(config.text_config, size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("q_lora_rank", None),
        ("num_experts", "many"),
        ("num_experts_per_token", 1000),
        ("hidden_act", "silu"),
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("moe_router_activation_func", "softmax"),
        ("moe_renormalize", False),
        ("num_expert_group", 8),
        ("latent_moe_use_norm", False),
        ("tie_word_embeddings", True),
        ("num_key_value_heads", 1),
        ("activation_situ_beta", None),
        ("attn_res_block_size", None),
        ("routed_expert_hidden_size", 100),
        ("linear_attn_config", None),
        ("quantization_config", None),
        ("quantization_config", {"format": "nvfp4-pack-quantized"}),
    ],
)
def test_an_unsupported_field_is_named(fields: dict[str, Any], field: str, value: Any) -> None:
    fields["text_config"][field] = value
    with pytest.raises(ConfigError, match=rf"text_config\.{field}.*expected"):
        check(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_full_rank_gate", False),
        ("gate_lower_bound", None),
        ("gate_lower_bound", -6.0),
        ("head_dim", None),
        ("kda_layers", [1]),
        ("full_attn_layers", []),
    ],
)
def test_an_unsupported_field_of_the_kda_layers_is_named(fields: dict[str, Any], field: str, value: Any) -> None:
    fields["text_config"]["linear_attn_config"][field] = value
    with pytest.raises(ConfigError, match=r"text_config\.linear_attn_config"):
        check(fields)


def test_a_tensor_parallel_size_that_does_not_divide_lists_those_that_do(fields: dict[str, Any]) -> None:
    text = KimiK3Config(**fields).text_config
    check_parallel(text, 2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 3 does not divide .* sizes that fit: \[1, 2"):
        check_parallel(text, 3)


def test_a_draft_is_refused_with_what_to_do() -> None:
    check_speculation(None)
    with pytest.raises(ConfigError, match=r"'dspark'.*VLLM_KIMI_K3_MODEL=vllm"):
        check_speculation("dspark")


def test_latent_projections_are_not_quantised(fields: dict[str, Any]) -> None:
    config = KimiK3Config(**fields)
    assert getattr(config, "quantization_config", None) is None
    assert getattr(config.text_config, "quantization_config", None) is None
    assert config.text_config.expert_quantization["format"] == "mxfp4-pack-quantized"
    again = KimiK3Config(**json.loads(json.dumps(config.to_dict())))
    assert again.text_config.expert_quantization == config.text_config.expert_quantization
