"""Hugging Face config classes of K3, and the checks of what the model code assumes about them.

Field names and meaning are those of the published ``config.json``. ``quantization_config`` of the text part is kept
under another name on purpose: it says which *experts* are MXFP4, and read as vLLM reads it, it would quantise the two
latent projections too, which the checkpoint stores in bf16.
"""

from typing import Any, ClassVar, NoReturn

from transformers.configuration_utils import PretrainedConfig


class ConfigError(ValueError):
    """The config describes a model that this plugin does not implement."""


class KimiLinearConfig(PretrainedConfig):
    """The text model: ``text_config`` of a K3 config."""

    model_type = "kimi_linear"

    def __init__(self, **fields: Any) -> None:
        quantization = fields.pop("quantization_config", None)
        self.expert_quantization: dict[str, Any] | None = fields.pop("expert_quantization", quantization)
        super().__init__(**fields)


class KimiK3VisionConfig(PretrainedConfig):
    """The vision tower and projector: ``vision_config`` of a K3 config."""

    model_type = "kimi_k3_vision"


class KimiK3Config(PretrainedConfig):
    """A whole K3 model: text, vision and the ids that tie them together."""

    model_type = "kimi_k3"
    sub_configs: ClassVar = {"text_config": KimiLinearConfig, "vision_config": KimiK3VisionConfig}

    def __init__(self, text_config: Any = None, vision_config: Any = None, **fields: Any) -> None:
        fields.pop("quantization_config", None)
        self.text_config = _sub_config(KimiLinearConfig, text_config)
        self.vision_config = _sub_config(KimiK3VisionConfig, vision_config)
        super().__init__(**fields)


def _sub_config(kind: type[PretrainedConfig], value: Any) -> PretrainedConfig:
    if isinstance(value, PretrainedConfig):
        return value
    return kind(**(value or {}))


#: field of the text config -> (what it must be, why)
_FIXED: dict[str, tuple[Any, str]] = {
    "hidden_act": ("situ", "the MLPs and experts are SiTU-gated"),
    "mla_use_nope": (True, "MLA layers carry no position encoding"),
    "mla_use_output_gate": (True, "MLA layers have an output gate"),
    "moe_router_activation_func": ("sigmoid", "the router scores experts with a sigmoid"),
    "moe_renormalize": (True, "the chosen experts' weights are renormalised"),
    "num_expert_group": (1, "the router has one expert group"),
    "topk_group": (1, "the router has one expert group"),
    "moe_layer_freq": (1, "every layer after the dense ones is MoE"),
    "latent_moe_use_norm": (True, "the latent of the experts is normalised before its up-projection"),
    "tie_word_embeddings": (False, "embedding and head are separate tensors"),
}

_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "attn_res_block_size",
    "max_position_embeddings",
)


def _fail(field: str, value: Any, expected: str) -> NoReturn:
    raise ConfigError(
        f"config.json: text_config.{field} is {value!r}, expected {expected}. vllm-kimi-k3 serves Kimi K3 only; "
        f"set VLLM_KIMI_K3_DISABLE=1 to serve this model with vLLM's own class"
    )


def check_config(text: PretrainedConfig) -> None:
    """Check each assumption of the model code against the text config.

    Raises:
        ConfigError: names the field, its value and what it must be.
    """
    for field in _POSITIVE:
        value = getattr(text, field, None)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            _fail(field, value, "a positive integer")
    for field, (expected, why) in _FIXED.items():
        value = getattr(text, field, None)
        if value != expected:
            _fail(field, value, f"{expected!r} ({why})")
    if text.num_key_value_heads != text.num_attention_heads:
        _fail("num_key_value_heads", text.num_key_value_heads, f"{text.num_attention_heads}, as num_attention_heads")
    if text.num_experts_per_token > text.num_experts:
        _fail("num_experts_per_token", text.num_experts_per_token, f"at most num_experts, {text.num_experts}")
    beta = getattr(text, "activation_situ_beta", None)
    if not isinstance(beta, (int, float)) or beta <= 0:
        _fail("activation_situ_beta", beta, "a positive number")
    _check_linear_attention(text)
    _check_experts(text)


def _check_linear_attention(text: PretrainedConfig) -> None:
    linear = getattr(text, "linear_attn_config", None)
    if not isinstance(linear, dict):
        _fail("linear_attn_config", linear, "an object that describes the KDA layers")
    for field in ("num_heads", "head_dim", "short_conv_kernel_size"):
        if not isinstance(linear.get(field), int) or linear[field] <= 0:
            _fail(f"linear_attn_config.{field}", linear.get(field), "a positive integer")
    if linear.get("use_full_rank_gate") is not True:
        _fail("linear_attn_config.use_full_rank_gate", linear.get("use_full_rank_gate"), "true")
    bound = linear.get("gate_lower_bound")
    if not isinstance(bound, (int, float)) or not -5.0 <= bound < 0:
        _fail("linear_attn_config.gate_lower_bound", bound, "a number in [-5, 0)")
    layers = sorted([*linear.get("kda_layers", ()), *linear.get("full_attn_layers", ())])
    if layers != list(range(1, text.num_hidden_layers + 1)):
        _fail(
            "linear_attn_config",
            {name: linear.get(name) for name in ("kda_layers", "full_attn_layers")},
            f"kda_layers and full_attn_layers that name each of the layers 1 to {text.num_hidden_layers} once",
        )
    if not linear.get("full_attn_layers"):
        _fail("linear_attn_config.full_attn_layers", linear.get("full_attn_layers"), "at least one MLA layer")


def _check_experts(text: PretrainedConfig) -> None:
    quantization = text.expert_quantization
    if not isinstance(quantization, dict) or quantization.get("format") != "mxfp4-pack-quantized":
        _fail(
            "quantization_config.format",
            quantization.get("format") if isinstance(quantization, dict) else quantization,
            "'mxfp4-pack-quantized' (experts are served from their MXFP4 bytes)",
        )
    for field in ("routed_expert_hidden_size", "moe_intermediate_size"):
        if getattr(text, field) % 32:
            _fail(field, getattr(text, field), "a multiple of 32, the MXFP4 group")


def check_parallel(text: PretrainedConfig, tp_size: int) -> None:
    """Check that every sliced dimension divides by the tensor-parallel size.

    Raises:
        ConfigError: names the field, its value, the size and the sizes that fit.
    """
    heads = text.num_attention_heads
    dims = {
        "num_attention_heads": heads,
        "linear_attn_config.num_heads": text.linear_attn_config["num_heads"],
        "intermediate_size": text.intermediate_size,
        # An expert's inner rows are cut between MXFP4 groups.
        "moe_intermediate_size in groups of 32": text.moe_intermediate_size // 32,
    }
    for field, value in dims.items():
        if value % tp_size:
            fitting = [n for n in range(1, heads + 1) if all(dim % n == 0 for dim in dims.values())]
            raise ConfigError(
                f"--tensor-parallel-size {tp_size} does not divide {field} ({value}); sizes that fit: {fitting}"
            )


def check_speculation(method: str | None) -> None:
    """Check that no draft is asked for: the plugin's model does not hand its hidden states to one yet.

    Args:
        method: of ``--speculative-config``; None without it.

    Raises:
        ConfigError: names the method and what to do.
    """
    if method is not None:
        raise ConfigError(
            f"--speculative-config with method {method!r}: the plugin's K3 does not run drafts yet; leave the option "
            "out, or serve vLLM's own model class with VLLM_KIMI_K3_MODEL=vllm"
        )
