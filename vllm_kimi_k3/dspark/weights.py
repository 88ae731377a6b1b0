"""The published tensors of a draft: their names and shapes, and reading them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from vllm_kimi_k3.dspark.contract import flat, layout_of

#: In the MLA layout the file may hold it, and it is not read: embedding and head are the target's.
SHARED = "embed_tokens.weight"


class DraftError(ValueError):
    """The draft's files are not those of its config."""


def tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Published name to shape, of all that the draft owns.

    Args:
        config: the published ``config.json``, which passed :func:`vllm_kimi_k3.dspark.contract.misfits`.
    """
    c, mla = flat(config), layout_of(config) == "mla"
    h, vocabulary, rank = c["hidden_size"], c["vocab_size"], c["markov_rank"]
    taps = c["target_layer_ids" if mla else "aux_hidden_state_layer_ids"]
    project, norm, final = ("context_proj", "context_norm", "final_norm") if mla else ("fc", "hidden_norm", "norm")
    found: dict[str, tuple[int, ...]] = {
        f"{project}.weight": (h, len(taps) * h),
        f"{norm}.weight": (h,),
        f"{final}.weight": (h,),
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (vocabulary, rank),
    }
    if c.get("enable_confidence_head"):
        found |= {"confidence_head.proj.weight": (1, h + rank), "confidence_head.proj.bias": (1,)}
    if not mla:
        found |= {"embed_tokens.weight": (vocabulary, h), "lm_head.weight": (vocabulary, h)}
    attention = _mla(c) if mla else _gqa(c)
    inner = c["intermediate_size"]
    for i in range(c["num_hidden_layers"]):
        found |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.mlp.gate_proj.weight": (inner, h),
            f"layers.{i}.mlp.up_proj.weight": (inner, h),
            f"layers.{i}.mlp.down_proj.weight": (h, inner),
        }
        found |= {f"layers.{i}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    return found


def _mla(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    return {
        "q_a_proj": (c["q_lora_rank"], h),
        "q_a_layernorm": (c["q_lora_rank"],),
        "q_b_proj": (heads * (c["qk_nope_head_dim"] + rope), c["q_lora_rank"]),
        "kv_a_proj_with_mqa": (c["kv_lora_rank"] + rope, h),
        "kv_a_layernorm": (c["kv_lora_rank"],),
        "kv_b_proj": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"]),
        "o_proj": (h, heads * c["v_head_dim"]),
    }


def _gqa(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    h, width = c["hidden_size"], c["head_dim"]
    wide, narrow = c["num_attention_heads"] * width, c["num_key_value_heads"] * width
    return {
        "q_proj": (wide, h),
        "k_proj": (narrow, h),
        "v_proj": (narrow, h),
        "o_proj": (h, wide),
        "q_norm": (width,),
        "k_norm": (width,),
    }


def read(path: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """All tensors that the draft owns, as stored, from every ``*.safetensors`` of a directory.

    Raises:
        DraftError: there is no such file, or a tensor is missing, of another shape, or unknown; the message names it.
    """
    wanted, found = tensors(config), dict[str, Tensor]()
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise DraftError(f"{path}: no .safetensors file; download the draft again")
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  a handle, not a mapping
                if name == SHARED and name not in wanted:
                    continue
                shape = tuple(opened.get_slice(name).get_shape())
                if name not in wanted:
                    raise DraftError(f"{file}: {name} is no tensor of a draft with this config.json")
                if shape != wanted[name]:
                    raise DraftError(f"{file}: {name} has the shape {shape}, its config.json says {wanted[name]}")
                found[name] = opened.get_tensor(name)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise DraftError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return found
