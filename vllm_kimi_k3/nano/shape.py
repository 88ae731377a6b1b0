"""The sizes of the miniature, and the config.json that states them."""

from dataclasses import dataclass
from typing import Any

from vllm_kimi_k3.chat.tokens import SpecialTokens


@dataclass(frozen=True)
class Shape:
    """Sizes of a miniature K3; names as in the published ``text_config``, layer kinds 0-based.

    The defaults keep what the release relies on: KDA and MLA 3:1 with the last two layers MLA, AttnRes blocks (of 3,
    the release has 12), layer 0 dense, two shared experts. Heads, expert inner and its groups of 32 divide by 2 and 4,
    so tensor parallelism slices them.
    """

    ranks: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 9
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 32
    v_head_dim: int = 64
    kda_head_dim: int = 64
    kda_conv_size: int = 4
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 2
    moe_intermediate_size: int = 128
    routed_expert_hidden_size: int = 64
    attn_res_block_size: int = 3
    max_position_embeddings: int = 8192
    #: Entries of ``A_log`` in the file; the release pads 96 heads to 128.
    a_log_entries: int = 8

    @property
    def vocab_size(self) -> int:
        return SpecialTokens.from_ranks(self.ranks).vocab_size

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based MLA layers: every fourth, and the last."""
        last = self.num_hidden_layers - 1
        return tuple(i for i in range(self.num_hidden_layers) if i % 4 == 3 or i == last)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)


# What transformers dumps into every config of its time. It says nothing about the model, but the published text_config
# carries it, and some of it (top_k 50) is what an engine could mistake for a default of the model.
_DUMPED: dict[str, Any] = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tie_encoder_decoder": False,
    "tf_legacy_loss": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torchscript": False,
    "transformers_version": "4.56.2",
    "typical_p": 1.0,
    "use_bfloat16": False,
}

_QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "scale_dtype": "torch.uint8",
                "strategy": "group",
                "symmetric": True,
                "type": "float",
                "zp_dtype": None,
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def text_config(shape: Shape) -> dict[str, Any]:
    """``text_config`` with every field of the published one and the sizes of ``shape``."""
    special = SpecialTokens.from_ranks(shape.ranks)
    return _DUMPED | {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": shape.attn_res_block_size,
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
            "AutoModel": "modeling_kimi_linear.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
        },
        "bos_token_id": special.bos,
        "dtype": "bfloat16",
        "eos_token_id": special.end_of_msg,
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "kv_lora_rank": shape.kv_lora_rank,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            # The published layer numbers count from 1.
            "full_attn_layers": [i + 1 for i in shape.mla_layers],
            "gate_lower_bound": -5.0,
            "head_dim": shape.kda_head_dim,
            "kda_layers": [i + 1 for i in shape.kda_layers],
            "num_heads": shape.num_attention_heads,
            "short_conv_kernel_size": shape.kda_conv_size,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": shape.max_position_embeddings,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": shape.num_attention_heads,
        "num_expert_group": 1,
        "num_experts": shape.num_experts,
        "num_experts_per_token": shape.num_experts_per_token,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_attention_heads,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": shape.num_shared_experts,
        "pad_token_id": special.pad,
        "q_lora_rank": shape.q_lora_rank,
        "qk_nope_head_dim": shape.qk_nope_head_dim,
        "qk_rope_head_dim": shape.qk_rope_head_dim,
        "quantization_config": _QUANTIZATION,
        "rms_norm_eps": 1e-5,
        "routed_expert_hidden_size": shape.routed_expert_hidden_size,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": shape.v_head_dim,
        "vocab_size": shape.vocab_size,
    }


def vision_config(shape: Shape) -> dict[str, Any]:
    """``vision_config`` with every field of the published one: two blocks of width 32, four heads of 16."""
    return {
        "_attn_implementation": "flash_attention_2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "init_pos_emb_height": 8,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": 8,
        "linear_bias": False,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": 32,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": False,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": 64,
        "text_hidden_size": shape.hidden_size,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 64,
        "vt_num_attention_heads": 4,
        "vt_num_hidden_layers": 2,
    }


def k3_config(shape: Shape) -> dict[str, Any]:
    """A whole ``config.json`` in the published structure."""
    special = SpecialTokens.from_ranks(shape.ranks)
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "bos_token_id": special.bos,
        "dtype": "bfloat16",
        "eos_token_id": special.end_of_msg,
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": special.media_pad,
        "model_type": "kimi_k3",
        "pad_token_id": special.pad,
        "text_config": text_config(shape),
        "tie_word_embeddings": False,
        "vision_config": vision_config(shape),
    }
