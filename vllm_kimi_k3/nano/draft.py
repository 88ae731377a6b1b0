"""The miniature's DSpark draft: its sizes, its tensors in the layout of the published MLA draft, and its files."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_kimi_k3.nano.layout import Spec
from vllm_kimi_k3.nano.shape import Shape

#: Guesses a block is trained for, as of the release's draft.
BLOCK = 7
# K3's mask token is the reserved token 163837, this many above its last rank.
_MASK_OFFSET = 253


@dataclass(frozen=True)
class DraftShape:
    """Sizes of the draft, beside those of its target that it must share (hidden size and vocabulary)."""

    target: Shape = field(default_factory=Shape)
    num_hidden_layers: int = 2
    intermediate_size: int = 384
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    markov_rank: int = 64
    #: 0-based: the ends of the first two AttnRes blocks, and the last layer but one.
    target_layer_ids: tuple[int, ...] = (2, 5, 7)


def draft_config(s: DraftShape) -> dict[str, Any]:
    """A ``config.json`` with every field of the published one."""
    hidden, vocabulary = s.target.hidden_size, s.target.vocab_size
    return {
        "_torchspec_version": "0.1.0",
        "architectures": ["K3DSparkModel"],
        "confidence_head_with_markov": True,
        "draft_vocab_size": vocabulary,
        "enable_confidence_head": True,
        "hidden_size": hidden,
        "intermediate_size": s.intermediate_size,
        "kv_lora_rank": s.kv_lora_rank,
        "markov_head_type": "vanilla",
        "markov_rank": s.markov_rank,
        "mask_token_id": s.target.ranks + _MASK_OFFSET,
        "max_position_embeddings": s.target.max_position_embeddings,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "model_type": "k3_dspark",
        "num_attention_heads": s.num_attention_heads,
        "num_hidden_layers": s.num_hidden_layers,
        "num_key_value_heads": s.num_attention_heads,
        "num_target_layers": len(s.target_layer_ids),
        "q_lora_rank": s.q_lora_rank,
        "qk_nope_head_dim": s.qk_nope_head_dim,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": s.target.max_position_embeddings // 4,
            "rope_theta": 50000.0,
            "rope_type": "yarn",
        },
        "rope_theta": 50000.0,
        "target_hidden_size": hidden,
        "target_layer_ids": list(s.target_layer_ids),
        "target_num_hidden_layers": s.target.num_hidden_layers,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "v_head_dim": s.v_head_dim,
        "vocab_size": vocabulary,
    }


def draft_tensors(s: DraftShape) -> dict[str, Spec]:
    """Published name to spec; kinds as in :mod:`vllm_kimi_k3.nano.layout`, and ``zero`` for what starts so."""
    h, vocabulary, heads = s.target.hidden_size, s.target.vocab_size, s.num_attention_heads
    found = {
        "embed_tokens.weight": Spec((vocabulary, h), "embedding"),
        "context_proj.weight": Spec((h, len(s.target_layer_ids) * h), "linear"),
        "context_norm.weight": Spec((h,), "norm"),
        "final_norm.weight": Spec((h,), "norm"),
        "markov_head.markov_w1.weight": Spec((vocabulary, s.markov_rank), "embedding"),
        "markov_head.markov_w2.weight": Spec((vocabulary, s.markov_rank), "zero"),
        "confidence_head.proj.weight": Spec((1, h + s.markov_rank), "zero"),
        "confidence_head.proj.bias": Spec((1,), "zero"),
    }
    for i in range(s.num_hidden_layers):
        layer = f"layers.{i}"
        found |= {
            f"{layer}.input_layernorm.weight": Spec((h,), "norm"),
            f"{layer}.post_attention_layernorm.weight": Spec((h,), "norm"),
            f"{layer}.self_attn.q_a_proj.weight": Spec((s.q_lora_rank, h), "linear"),
            f"{layer}.self_attn.q_a_layernorm.weight": Spec((s.q_lora_rank,), "norm"),
            f"{layer}.self_attn.q_b_proj.weight": Spec(
                (heads * (s.qk_nope_head_dim + s.qk_rope_head_dim), s.q_lora_rank), "linear"
            ),
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": Spec((s.kv_lora_rank + s.qk_rope_head_dim, h), "linear"),
            f"{layer}.self_attn.kv_a_layernorm.weight": Spec((s.kv_lora_rank,), "norm"),
            f"{layer}.self_attn.kv_b_proj.weight": Spec(
                (heads * (s.qk_nope_head_dim + s.v_head_dim), s.kv_lora_rank), "linear"
            ),
            f"{layer}.self_attn.o_proj.weight": Spec((h, heads * s.v_head_dim), "linear"),
            f"{layer}.mlp.gate_proj.weight": Spec((s.intermediate_size, h), "linear"),
            f"{layer}.mlp.up_proj.weight": Spec((s.intermediate_size, h), "linear"),
            f"{layer}.mlp.down_proj.weight": Spec((h, s.intermediate_size), "linear"),
        }
    return found


def starting_draft(s: DraftShape, embeddings: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """fp32 weights that training starts from; ``embeddings`` [vocabulary, hidden] are the target's."""
    weights: dict[str, Tensor] = {}
    for name, (size, kind) in draft_tensors(s).items():
        if name == "embed_tokens.weight":
            weights[name] = embeddings.float().cpu()
        elif kind == "linear":
            weights[name] = torch.randn(size, generator=generator) * 0.5 / math.sqrt(size[-1])
        elif kind == "embedding":
            weights[name] = torch.randn(size, generator=generator) * 0.5
        else:
            weights[name] = torch.ones(size) if kind == "norm" else torch.zeros(size)
    return weights


def write_draft(out: Path, s: DraftShape, weights: Mapping[str, Tensor]) -> Path:
    """Write ``config.json`` and ``model.safetensors`` (bf16) into ``out``, made if absent.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    specs = draft_tensors(s)
    for name, spec in specs.items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != spec.shape:
            raise ValueError(f"{name}: the layout has the shape {spec.shape}, the weights have {found}")
    out.mkdir(parents=True, exist_ok=True)
    stored = {name: weights[name].detach().cpu().bfloat16().contiguous() for name in specs}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    # The writer makes files that only their owner reads.
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(draft_config(s), indent=2) + "\n")
    return out
