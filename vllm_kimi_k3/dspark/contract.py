"""What a draft must have in common with its target; read from the two configs, before anything is loaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

#: Guesses a block of an MLA draft whose config names none: the published one's, by its model card.
MLA_BLOCK = 7
#: K3's vocabulary ends in this many reserved ids; a mask token among the others would be text.
_RESERVED = 256
_YARN = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")


@dataclass(frozen=True)
class Misfit:
    """A field of the draft's config that does not fit, its value, and what would."""

    field: str
    value: Any
    expected: str

    def __str__(self) -> str:
        return f"draft config {self.field} is {self.value!r}, expected {self.expected}"


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a published ``config.json``; what Speculators nests in ``transformer_layer_config`` comes out."""
    return {**(config.get("transformer_layer_config") or {}), **config}


def layout_of(config: Mapping[str, Any]) -> str | None:
    """``"mla"`` for the layout of ``Inferact/Kimi-K3-DSpark``, ``"gqa"`` for that of ``RedHatAI/…speculator.dspark``.

    None for any other, among them ``RadixArk/Kimi-K3-DSpark``, of which too little is published.
    """
    if config.get("model_type") == "k3_dspark":
        return "mla"
    if config.get("speculators_model_type") == "dspark" or "DSparkDraftModel" in (config.get("architectures") or ()):
        return "gqa"
    return None


def taps_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """0-based layers after which the target's stream is tapped.

    The GQA layout counts what has been run instead, so that its 24 is the stream after layer 23.
    """
    if layout_of(config) == "gqa":
        return tuple(i - 1 for i in config.get("aux_hidden_state_layer_ids") or ())
    return tuple(config.get("target_layer_ids") or ())


def block_of(config: Mapping[str, Any]) -> int:
    """Guesses a block was trained for; one fewer than its tokens where the anchor itself guesses nothing."""
    return int(config.get("block_size") or MLA_BLOCK) - (config.get("sample_from_anchor") is False)


def misfits(config: Mapping[str, Any], text: Any, tokens: int | None = None) -> list[Misfit]:
    """All that keeps a draft from guessing for a target.

    Args:
        config: the draft's ``config.json``, as published.
        text: the target's text config, with its fields as attributes.
        tokens: ``num_speculative_tokens``; None if it is not given.
    """
    layout, fields = layout_of(config), flat(config)
    if layout is None:
        known = "a draft with model_type 'k3_dspark' or speculators_model_type 'dspark'"
        return [Misfit("architectures", fields.get("architectures"), known)]
    return [
        *_shared(fields, text),
        *_taps(fields, config, text),
        *_heads(fields),
        *(_mla(fields) if layout == "mla" else _gqa(fields)),
        *_length(config, tokens),
    ]


def _shared(fields: Mapping[str, Any], text: Any) -> Iterator[Misfit]:
    same = {
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "target_num_hidden_layers": text.num_hidden_layers,
    }
    for field, expected in same.items():
        if fields.get(field) is None and field not in ("hidden_size", "vocab_size"):
            continue
        if fields.get(field) != expected:
            yield Misfit(field, fields.get(field), f"{expected}, as the target")
    mask, first = fields.get("mask_token_id"), text.vocab_size - _RESERVED
    if not _whole(mask) or not first <= mask < text.vocab_size:
        yield Misfit("mask_token_id", mask, f"a reserved token of the target, {first} to {text.vocab_size - 1}")
    eps = fields.get("rms_norm_eps")
    if not isinstance(eps, float) or not 0 < eps < 1e-3:
        yield Misfit("rms_norm_eps", eps, "a number above 0 and below 0.001")


def _taps(fields: Mapping[str, Any], config: Mapping[str, Any], text: Any) -> Iterator[Misfit]:
    mla = layout_of(config) == "mla"
    field = "target_layer_ids" if mla else "aux_hidden_state_layer_ids"
    named, shift = fields.get(field), 0 if mla else 1
    bounds = f"{shift} to {text.num_hidden_layers - 1 + shift}"
    if not isinstance(named, list | tuple) or not named or not all(map(_whole, named)):
        yield Misfit(field, named, f"a list of the target's layers, {bounds}")
        return
    inside = min(named) >= shift and max(named) < text.num_hidden_layers + shift
    if not inside or list(named) != sorted(set(named)):
        yield Misfit(field, named, f"rising numbers of the target's layers, {bounds}")
    count = fields.get("num_target_layers")
    if mla and count is not None and count != len(named):
        yield Misfit("num_target_layers", count, f"{len(named)}, as many as target_layer_ids has")


def _heads(fields: Mapping[str, Any]) -> Iterator[Misfit]:
    kind, rank = fields.get("markov_head_type", "vanilla"), fields.get("markov_rank")
    if kind != "vanilla":
        yield Misfit("markov_head_type", kind, "'vanilla'")
    if not _whole(rank) or rank < 1:
        yield Misfit("markov_rank", rank, "a positive integer")
    if fields.get("enable_confidence_head") and fields.get("confidence_head_with_markov") is False:
        yield Misfit("confidence_head_with_markov", False, "true: the confidence head reads the Markov embedding too")


def _mla(fields: Mapping[str, Any]) -> Iterator[Misfit]:
    for field in ("mla_use_nope", "mla_use_output_gate"):
        if fields.get(field):
            yield Misfit(field, fields[field], "false")
    rope = fields.get("rope_parameters") or {}
    missing = [name for name in (*_YARN, "mscale_all_dim") if not isinstance(rope.get(name), int | float)]
    if rope.get("rope_type") != "yarn" or missing:
        lacks = f" with {', '.join(missing)}" if missing else ""
        yield Misfit("rope_parameters", fields.get("rope_parameters"), f"rope_type 'yarn'{lacks}")
        return
    reach = rope["factor"] * rope["original_max_position_embeddings"]
    longest = fields.get("max_position_embeddings") or 0
    if reach < longest:
        expected = f"a factor that stretches to max_position_embeddings, {longest}"
        yield Misfit("rope_parameters.factor", rope["factor"], expected)


def _gqa(fields: Mapping[str, Any]) -> Iterator[Misfit]:
    need: dict[str, tuple[Callable[[Any], bool], str]] = {
        "head_dim": (lambda x: x % 2 == 0, "an even number"),
        "sliding_window": (lambda x: x >= 1, "the tokens that a layer sees"),
        "num_key_value_heads": (
            lambda x: _whole(fields.get("num_attention_heads")) and fields["num_attention_heads"] % x == 0,
            f"a divisor of num_attention_heads, {fields.get('num_attention_heads')}",
        ),
    }
    for field, (fits, expected) in need.items():
        value = fields.get(field)
        if not _whole(value) or value < 1 or not fits(value):
            yield Misfit(field, value, expected)
    rope = fields.get("rope_parameters") or {}
    theta = rope.get("rope_theta", fields.get("rope_theta"))
    if not isinstance(theta, int | float) or theta <= 1:
        yield Misfit("rope_theta", theta, "a number above 1")
    if rope.get("rope_type", "default") != "default" or fields.get("rope_scaling"):
        yield Misfit("rope_parameters", rope or fields["rope_scaling"], "plain rotary: the window needs no stretching")
    kinds = set(fields.get("layer_types") or ())
    if kinds - {"sliding_attention"}:
        yield Misfit("layer_types", sorted(kinds), "sliding_attention in every layer")


def _length(config: Mapping[str, Any], tokens: int | None) -> Iterator[Misfit]:
    most = block_of(flat(config))
    if tokens is not None and not 1 <= tokens <= most:
        yield Misfit("block", most, f"at least num_speculative_tokens, {tokens}: what it says further on is noise")


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
