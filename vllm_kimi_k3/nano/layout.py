"""Every tensor of a miniature K3 by its published name, with its shape and what kind of weight it is."""

from typing import NamedTuple

from vllm_kimi_k3.nano.shape import Shape, vision_config


class Spec(NamedTuple):
    """Shape of a tensor and its kind.

    Kinds: ``linear`` [out, in], ``expert`` [out, in] (stored as MXFP4), ``embedding`` [vocabulary, width], ``norm``
    [n], ``query`` [1, n] (of an AttnRes mixer), ``conv`` [channels, 1, kernel]; and the fp32 ones ``a_log``,
    ``dt_bias`` and ``router_bias``.
    """

    shape: tuple[int, ...]
    kind: str


def text_tensors(s: Shape) -> dict[str, Spec]:
    """Published name to spec for the text model; an expert stands under ``….w1.weight``, before packing."""
    root = "language_model.model"
    found = {
        f"{root}.embed_tokens.weight": Spec((s.vocab_size, s.hidden_size), "embedding"),
        f"{root}.norm.weight": Spec((s.hidden_size,), "norm"),
        "language_model.lm_head.weight": Spec((s.vocab_size, s.hidden_size), "linear"),
    } | _mixer(f"{root}.output_attn_res", s)
    for i in range(s.num_hidden_layers):
        layer = f"{root}.layers.{i}"
        found |= {
            f"{layer}.input_layernorm.weight": Spec((s.hidden_size,), "norm"),
            f"{layer}.post_attention_layernorm.weight": Spec((s.hidden_size,), "norm"),
        }
        found |= _mixer(f"{layer}.self_attention_res", s) | _mixer(f"{layer}.mlp_res", s)
        found |= (_mla if i in s.mla_layers else _kda)(f"{layer}.self_attn", s)
        if i == 0:
            found |= _mlp(f"{layer}.mlp", s.hidden_size, s.intermediate_size)
        else:
            found |= _moe(f"{layer}.block_sparse_moe", s)
    return found


def _mixer(name: str, s: Shape) -> dict[str, Spec]:
    return {
        f"{name}_norm.weight": Spec((s.hidden_size,), "norm"),
        f"{name}_proj.weight": Spec((1, s.hidden_size), "query"),
    }


def _kda(name: str, s: Shape) -> dict[str, Spec]:
    h, heads, dim = s.hidden_size, s.num_attention_heads, s.kda_head_dim
    channels = heads * dim
    found = {f"{name}.{p}_proj.weight": Spec((channels, h), "linear") for p in ("q", "k", "v", "g")}
    found |= {f"{name}.{p}_conv1d.weight": Spec((channels, 1, s.kda_conv_size), "conv") for p in ("q", "k", "v")}
    return found | {
        f"{name}.f_a_proj.weight": Spec((dim, h), "linear"),
        f"{name}.f_b_proj.weight": Spec((channels, dim), "linear"),
        f"{name}.b_proj.weight": Spec((heads, h), "linear"),
        f"{name}.A_log": Spec((s.a_log_entries,), "a_log"),
        f"{name}.dt_bias": Spec((channels,), "dt_bias"),
        f"{name}.o_norm.weight": Spec((dim,), "norm"),
        f"{name}.o_proj.weight": Spec((h, channels), "linear"),
    }


def _mla(name: str, s: Shape) -> dict[str, Spec]:
    h, heads, rope = s.hidden_size, s.num_attention_heads, s.qk_rope_head_dim
    value = heads * s.v_head_dim
    return {
        f"{name}.q_a_proj.weight": Spec((s.q_lora_rank, h), "linear"),
        f"{name}.q_a_layernorm.weight": Spec((s.q_lora_rank,), "norm"),
        f"{name}.q_b_proj.weight": Spec((heads * (s.qk_nope_head_dim + rope), s.q_lora_rank), "linear"),
        f"{name}.kv_a_proj_with_mqa.weight": Spec((s.kv_lora_rank + rope, h), "linear"),
        f"{name}.kv_a_layernorm.weight": Spec((s.kv_lora_rank,), "norm"),
        f"{name}.kv_b_proj.weight": Spec((heads * s.qk_nope_head_dim + value, s.kv_lora_rank), "linear"),
        f"{name}.g_proj.weight": Spec((value, h), "linear"),
        f"{name}.o_proj.weight": Spec((h, value), "linear"),
    }


def _mlp(name: str, hidden: int, inner: int) -> dict[str, Spec]:
    return {
        f"{name}.gate_proj.weight": Spec((inner, hidden), "linear"),
        f"{name}.up_proj.weight": Spec((inner, hidden), "linear"),
        f"{name}.down_proj.weight": Spec((hidden, inner), "linear"),
    }


def _moe(name: str, s: Shape) -> dict[str, Spec]:
    h, latent, inner = s.hidden_size, s.routed_expert_hidden_size, s.moe_intermediate_size
    found = {
        f"{name}.gate.weight": Spec((s.num_experts, h), "linear"),
        f"{name}.gate.e_score_correction_bias": Spec((s.num_experts,), "router_bias"),
        f"{name}.routed_expert_down_proj.weight": Spec((latent, h), "linear"),
        f"{name}.routed_expert_norm.weight": Spec((latent,), "norm"),
        f"{name}.routed_expert_up_proj.weight": Spec((h, latent), "linear"),
    } | _mlp(f"{name}.shared_experts", h, s.num_shared_experts * inner)
    for e in range(s.num_experts):
        found |= {
            f"{name}.experts.{e}.w1.weight": Spec((inner, latent), "expert"),
            f"{name}.experts.{e}.w2.weight": Spec((latent, inner), "expert"),
            f"{name}.experts.{e}.w3.weight": Spec((inner, latent), "expert"),
        }
    return found


def vision_tensors(s: Shape) -> dict[str, Spec]:
    """Published name to spec for the vision tower and projector of :func:`vision_config`."""
    v = vision_config(s)
    hidden, inner, qkv = v["vt_hidden_size"], v["vt_intermediate_size"], v["qkv_hidden_size"]
    patch, merged = v["patch_size"], hidden * v["merge_kernel_size"][0] * v["merge_kernel_size"][1]
    positions = (v["init_pos_emb_height"], v["init_pos_emb_width"], hidden)
    found = {
        "vision_tower.patch_embed.proj.weight": Spec((hidden, 3, patch, patch), "linear"),
        "vision_tower.patch_embed.pos_emb.weight": Spec(positions, "embedding"),
        "vision_tower.encoder.final_layernorm.weight": Spec((hidden,), "norm"),
        "mm_projector.proj.0.weight": Spec((merged, merged), "linear"),
        "mm_projector.proj.2.weight": Spec((s.hidden_size, merged), "linear"),
        "mm_projector.post_norm.weight": Spec((s.hidden_size,), "norm"),
    }
    for i in range(v["vt_num_hidden_layers"]):
        block = f"vision_tower.encoder.blocks.{i}"
        found |= {
            f"{block}.norm0.weight": Spec((hidden,), "norm"),
            f"{block}.norm1.weight": Spec((hidden,), "norm"),
            f"{block}.wqkv.weight": Spec((3 * qkv, hidden), "linear"),
            f"{block}.wo.weight": Spec((hidden, qkv), "linear"),
            f"{block}.mlp.fc0.weight": Spec((inner, hidden), "linear"),
            f"{block}.mlp.fc1.weight": Spec((hidden, inner), "linear"),
        }
    return found
