"""The published tensors of a K3, and where each goes in the model: the one table of names, shapes, fusions and slices.

Names are relative to their layer or to the text model. A rank of a tensor-parallel group holds rows of a tensor (heads,
gates, inner widths), columns of one (what reads those rows' outputs), or all of it. Parameters are those of the classes
in this package.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_kimi_k3.ops.mxfp4 import GROUP

#: vLLM's embedding and head pad the vocabulary to a multiple of this before they slice it.
_VOCABULARY_MULTIPLE = 64

#: Name of the experts inside a layer.
EXPERTS = "block_sparse_moe.experts"


@dataclass(frozen=True)
class Share:
    """What one process holds of the model.

    Attributes:
        layers: the layers of its pipeline stage, of consecutive numbers.
        tp_rank, tp_size: its place in the tensor-parallel group.
        ep_rank, ep_size: its place in the expert-parallel group. With a size above 1 it holds whole experts, a
            contiguous run of them; else every expert is sliced over the tensor-parallel group.
    """

    layers: range
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def part(self, size: int, what: str) -> int:
        """Size of one tensor-parallel slice of ``size``.

        Raises:
            ValueError: it does not divide.
        """
        if size % self.tp_size:
            raise ValueError(f"tensor-parallel size {self.tp_size} does not divide {what}, {size}")
        return size // self.tp_size

    def experts(self, count: int) -> range:
        """The experts, out of ``count``, that this process holds.

        Raises:
            ValueError: the expert-parallel size does not divide ``count``.
        """
        if count % self.ep_size:
            raise ValueError(f"expert-parallel size {self.ep_size} does not divide num_experts, {count}")
        local = count // self.ep_size
        return range(self.ep_rank * local, (self.ep_rank + 1) * local)


class Slot(NamedTuple):
    """How one published tensor fills a parameter on this rank.

    Attributes:
        parameter: its name, relative like the tensor's own.
        shape: of the published tensor.
        quantised: MXFP4 bytes or scales, uint8; else any of bf16, fp16 and fp32, cast to what the parameter is.
        dim: the dimension that is sliced.
        start, length: of the slice; all of ``dim`` if every rank holds the whole tensor.
        row: first row of the parameter that it fills.
        form: "exact"; "conv", where the published shape may lack the middle 1; "tail", where the published vector may
            be longer and what is past ``shape`` means nothing; or "vocabulary", where the parameter may have more rows.
    """

    parameter: str
    shape: tuple[int, ...]
    start: int
    length: int
    dim: int = 0
    row: int = 0
    quantised: bool = False
    form: str = "exact"

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stored tensor of this shape can be read."""
        if self.form == "conv":
            return shape in (self.shape, (self.shape[0], self.shape[2]))
        if self.form == "tail":
            return len(shape) == 1 and shape[0] >= self.shape[0]
        return shape == self.shape

    def expected(self) -> str:
        """The shapes that fit, for a message."""
        whole = list(self.shape)
        if self.form == "conv":
            return f"{whole} or {[whole[0], whole[2]]}"
        return f"{whole} or longer" if self.form == "tail" else f"{whole}"


class _Builder:
    """Collects the slots of one module; a tensor's name and its parameter's are relative to the module."""

    def __init__(self, share: Share, module: str) -> None:
        self.share, self.module = share, module
        self.slots: dict[str, Slot] = {}

    def whole(self, name: str, *shape: int, parameter: str = "") -> None:
        """A tensor that every rank holds."""
        self._add(name, Slot(parameter or name, shape, 0, shape[0]))

    def rows(self, name: str, *shape: int, form: str = "exact") -> None:
        """A tensor that is sliced by rows."""
        part = self.share.part(shape[0], f"the rows of {self.module}{name}")
        self._add(name, Slot(name, shape, self.share.tp_rank * part, part, form=form))

    def columns(self, name: str, *shape: int, parameter: str = "") -> None:
        """A tensor that is sliced by columns."""
        part = self.share.part(shape[1], f"the columns of {self.module}{name}")
        self._add(name, Slot(parameter or name, shape, self.share.tp_rank * part, part, dim=1))

    def fused(
        self, parameter: str, columns: tuple[int, ...], parts: Iterable[tuple[str, int, bool]], form: str = "exact"
    ) -> None:
        """Tensors whose rows stand one after the other in one parameter.

        Args:
            parameter: its name.
            columns: what follows the rows in each tensor's shape.
            parts: for each, in order, its name, its rows, and whether they are sliced.
            form: of each.
        """
        row = 0
        for name, rows, sliced in parts:
            part = self.share.part(rows, f"the rows of {self.module}{name}") if sliced else rows
            start = self.share.tp_rank * part if sliced else 0
            self._add(name, Slot(parameter, (rows, *columns), start, part, row=row, form=form))
            row += part

    def vocabulary(self, name: str, entries: int, width: int) -> None:
        """An embedding or a head."""
        part = self.share.part(-(-entries // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE, "the padded vocabulary")
        start = min(self.share.tp_rank * part, entries)
        self._add(name, Slot(name, (entries, width), start, min(part, entries - start), form="vocabulary"))

    def _add(self, name: str, slot: Slot) -> None:
        self.slots[self.module + name] = slot._replace(parameter=self.module + slot.parameter)


def model_slots(text: Any, share: Share) -> dict[str, Slot]:
    """What stands outside the layers, by name relative to the text model.

    Args:
        text: the text config.
        share: what this process holds; the pipeline stage does not matter here.
    """
    b = _Builder(share, "")
    b.vocabulary("model.embed_tokens.weight", text.vocab_size, text.hidden_size)
    b.vocabulary("lm_head.weight", text.vocab_size, text.hidden_size)
    b.whole("model.norm.weight", text.hidden_size)
    _mixer(b, "model.output_attn_res", text.hidden_size)
    return b.slots


def layer_slots(text: Any, share: Share, layer: int) -> dict[str, Slot]:
    """What a layer has beside its routed experts, by name relative to the layer."""
    hidden = text.hidden_size
    b = _Builder(share, "")
    b.whole("input_layernorm.weight", hidden)
    b.whole("post_attention_layernorm.weight", hidden)
    _mixer(b, "self_attention_res", hidden)
    _mixer(b, "mlp_res", hidden)
    kda = layer + 1 in text.linear_attn_config["kda_layers"]
    b.slots |= _kda_slots(text, share) if kda else _mla_slots(text, share)
    if layer < text.first_k_dense_replace:
        return b.slots | _mlp_slots(share, "mlp.", hidden, text.intermediate_size)
    return b.slots | _moe_slots(text, share)


def expert_slots(text: Any, share: Share) -> dict[str, Slot]:
    """What one routed expert has, by name relative to the expert; parameters are relative to the layer."""
    inner, latent = text.moe_intermediate_size, text.routed_expert_hidden_size
    whole = share.ep_size > 1
    groups = inner // GROUP if whole else share.part(inner // GROUP, "the groups of 32 of moe_intermediate_size")
    first = 0 if whole else share.tp_rank * groups
    rows, start = groups * GROUP, first * GROUP
    slots = {}
    # How many values share a byte: two a packed byte, a group a scale.
    for kind, per_byte in (("weight_packed", 2), ("weight_scale", GROUP)):
        for matrix, row in (("w1", 0), ("w3", rows)):
            shape = (inner, latent // per_byte)
            slots[f"{matrix}.{kind}"] = Slot(f"{EXPERTS}.w13_{kind}", shape, start, rows, row=row, quantised=True)
        shape, cut = (latent, inner // per_byte), (start // per_byte, rows // per_byte)
        slots[f"w2.{kind}"] = Slot(f"{EXPERTS}.w2_{kind}", shape, *cut, dim=1, quantised=True)
    return slots


def vision_slots(vision: Mapping[str, Any], share: Share) -> dict[str, Slot]:
    """The vision tower and projector, whole on every rank, by published name.

    Args:
        vision: the ``vision_config`` of a K3 config.
        share: what this process holds.
    """
    width, qkv = vision["vt_hidden_size"], vision["qkv_hidden_size"]
    patch, inner = vision["patch_size"], vision["vt_intermediate_size"]
    merged, out = width * vision["merge_kernel_size"][0] * vision["merge_kernel_size"][1], vision["text_hidden_size"]
    b = _Builder(share, "vision_tower.")
    b.whole("patch_embed.proj.weight", width, 3, patch, patch)
    b.whole("patch_embed.pos_emb.weight", vision["init_pos_emb_height"], vision["init_pos_emb_width"], width)
    for i in range(vision["vt_num_hidden_layers"]):
        block = f"encoder.blocks.{i}"
        b.whole(f"{block}.norm0.weight", width)
        b.whole(f"{block}.norm1.weight", width)
        b.whole(f"{block}.wqkv.weight", 3 * qkv, width)
        b.whole(f"{block}.wo.weight", width, qkv)
        b.whole(f"{block}.mlp.fc0.weight", inner, width)
        b.whole(f"{block}.mlp.fc1.weight", width, inner)
    b.whole("encoder.final_layernorm.weight", width)
    p = _Builder(share, "mm_projector.")
    p.whole("proj.0.weight", merged, merged)
    p.whole("proj.2.weight", out, merged)
    p.whole("post_norm.weight", out)
    return b.slots | p.slots


def _mixer(b: _Builder, site: str, hidden: int) -> None:
    b.whole(f"{site}_norm.weight", hidden, parameter=f"{site}.norm_weight")
    b.whole(f"{site}_proj.weight", 1, hidden, parameter=f"{site}.proj_weight")


def _kda_slots(text: Any, share: Share) -> dict[str, Slot]:
    linear, hidden = text.linear_attn_config, text.hidden_size
    heads, dim, kernel = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    wide = heads * dim
    b = _Builder(share, "self_attn.")
    parts = [(f"{name}_proj.weight", wide, True) for name in "qkvg"]
    parts += [("f_a_proj.weight", dim, False), ("b_proj.weight", heads, True)]
    b.fused("in_proj.weight", (hidden,), parts)
    b.fused("conv_weight", (1, kernel), [(f"{name}_conv1d.weight", wide, True) for name in "qkv"], form="conv")
    b.rows("f_b_proj.weight", wide, dim)
    b.rows("A_log", heads, form="tail")
    b.rows("dt_bias", wide)
    b.whole("o_norm.weight", dim)
    b.columns("o_proj.weight", hidden, wide)
    return b.slots


def _mla_slots(text: Any, share: Share) -> dict[str, Slot]:
    heads, hidden, rank = text.num_attention_heads, text.hidden_size, text.kv_lora_rank
    nope, rope, value = text.qk_nope_head_dim, text.qk_rope_head_dim, text.v_head_dim
    b = _Builder(share, "self_attn.")
    parts = [("q_a_proj.weight", text.q_lora_rank, False), ("kv_a_proj_with_mqa.weight", rank + rope, False)]
    b.fused("in_proj.weight", (hidden,), [*parts, ("g_proj.weight", heads * value, True)])
    b.whole("q_a_layernorm.weight", text.q_lora_rank)
    b.whole("kv_a_layernorm.weight", rank)
    b.rows("q_b_proj.weight", heads * (nope + rope), text.q_lora_rank)
    b.rows("kv_b_proj.weight", heads * (nope + value), rank)
    b.columns("o_proj.weight", hidden, heads * value)
    return b.slots


def _mlp_slots(share: Share, module: str, hidden: int, inner: int) -> dict[str, Slot]:
    b = _Builder(share, module)
    parts = [("gate_proj.weight", inner, True), ("up_proj.weight", inner, True)]
    b.fused("gate_up_proj.weight", (hidden,), parts)
    b.columns("down_proj.weight", hidden, inner)
    return b.slots


def _moe_slots(text: Any, share: Share) -> dict[str, Slot]:
    hidden, latent, module = text.hidden_size, text.routed_expert_hidden_size, "block_sparse_moe."
    b = _Builder(share, module)
    b.whole("gate.weight", text.num_experts, hidden)
    b.whole("gate.e_score_correction_bias", text.num_experts)
    shared = text.num_shared_experts * text.moe_intermediate_size
    parts = [
        # Not MXFP4, although the published list of what is left unquantised does not name them.
        ("routed_expert_down_proj.weight", latent, False),
        ("shared_experts.gate_proj.weight", shared, True),
        ("shared_experts.up_proj.weight", shared, True),
    ]
    b.fused("in_proj.weight", (hidden,), parts)
    b.whole("routed_expert_up_proj.weight", hidden, latent)
    b.whole("routed_expert_norm.weight", latent)
    b.columns("shared_experts.down_proj.weight", hidden, shared, parameter="shared_down_proj.weight")
    return b.slots
