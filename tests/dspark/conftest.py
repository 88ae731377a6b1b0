"""Drafts of both published layouts: their exact configs, and tiny ones of the same fields with random weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_kimi_k3.dspark.weights import tensors

INFERACT: dict[str, Any] = {
    "_torchspec_version": "0.1.0",
    "architectures": ["K3DSparkModel"],
    "confidence_head_with_markov": True,
    "draft_vocab_size": 163840,
    "enable_confidence_head": True,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "kv_lora_rank": 512,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 163837,
    "max_position_embeddings": 1048576,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "model_type": "k3_dspark",
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 64,
    "num_target_layers": 5,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "rope_type": "yarn",
    },
    "rope_theta": 50000.0,
    "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "target_num_hidden_layers": 93,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
REDHAT: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "block_size": 8,
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 163840,
    "transformer_layer_config": {
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 96,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 2048,
        "layer_types": ["sliding_attention"] * 5,
        "vocab_size": 163840,
    },
}
TINY_MLA = INFERACT | {
    "hidden_size": 48,
    "target_hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "markov_rank": 16,
    "vocab_size": 300,
    "draft_vocab_size": 300,
    "mask_token_id": 297,
    "target_layer_ids": [0, 3, 5],
    "num_target_layers": 3,
    "target_num_hidden_layers": 8,
}
TINY_GQA = REDHAT | {
    "aux_hidden_state_layer_ids": [1, 4, 8],
    "mask_token_id": 297,
    "markov_rank": 16,
    "draft_vocab_size": 300,
    "transformer_layer_config": REDHAT["transformer_layer_config"]
    | {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 9,
        "layer_types": ["sliding_attention"] * 2,
        "vocab_size": 300,
    },
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Every published tensor of a draft, fp32; norms around one, products that keep their input's size."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.2 * noise if name.endswith("norm.weight") else noise / shape[-1] ** 0.5
    return found


@pytest.fixture
def tiny_target() -> Any:
    """The text config that the tiny drafts are for."""
    return SimpleNamespace(hidden_size=48, vocab_size=300, num_hidden_layers=8)
