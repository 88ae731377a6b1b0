"""The weight plan: which tensor of a checkpoint fills which part of which parameter on this rank.

A checkpoint is checked whole before a byte of it is copied: names against the config when the plan is made, shapes and
types against the headers of the shard files. What only the data can show, a value that is not finite, is checked as it
is read. Every fault is a :class:`WeightError` that names the tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_kimi_k3.model.layout import EXPERTS, Share, Slot, expert_slots, layer_slots, model_slots, vision_slots

_TEXT = "language_model."
#: How the names of the vision tower's and the projector's tensors begin.
VISION = ("vision_tower.", "mm_projector.")
#: Type names of safetensors headers.
_FLOATS, _BYTES = ("BF16", "F16", "F32"), ("U8",)
#: How many problems a message spells out.
_SHOWN = 20
#: The E8M0 byte that means not-a-number.
_SCALE_NAN = 255


class Problem(NamedTuple):
    """One fault of a checkpoint: a tensor, the shard file that has or lacks it, what was expected and what is found."""

    tensor: str
    shard: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.tensor} in {self.shard}: expected {self.expected}, found {self.found}"


class WeightError(ValueError):
    """A checkpoint does not fit the model.

    Attributes:
        problems: all faults that were found; the message shows the first of them.
    """

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        lines = [f"  {problem}" for problem in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"  and {len(problems) - _SHOWN} more")
        count = "1 tensor" if len(problems) == 1 else f"{len(problems)} tensors"
        super().__init__("\n".join([f"the checkpoint does not fit the model, {count} at fault:", *lines]))


class Item(NamedTuple):
    """One tensor that this rank reads.

    Attributes:
        name: as published.
        shard: the file that holds it, relative to the checkpoint.
        parameter: the model's parameter, relative to the text model, or a vision tensor's name.
        expert: index along the parameter's first dimension, for a routed expert.
        slot: shape, slice and place.
    """

    name: str
    shard: str
    parameter: str
    expert: int | None
    slot: Slot

    def take(self, tensor: Any) -> Tensor:
        """This rank's slice of the published tensor, given as a tensor or as a slice object of safetensors."""
        end = self.slot.start + self.slot.length
        return tensor[self.slot.start : end] if self.slot.dim == 0 else tensor[:, self.slot.start : end]

    def expected(self) -> str:
        """Shape and types that fit, for a message."""
        return f"{self.slot.expected()} {' or '.join(self._dtypes())}"

    def mismatch(self, shape: list[int], dtype: str) -> Problem | None:
        """What is wrong with a stored tensor of this shape and type, as a safetensors header gives them."""
        if self.slot.fits(tuple(shape)) and dtype in self._dtypes():
            return None
        return Problem(self.name, self.shard, self.expected(), f"{shape} {dtype}")

    def checked(self, tensor: Tensor) -> Tensor:
        """``tensor``, if its values are finite.

        Raises:
            WeightError: NaN or infinity among them.
        """
        if not self.slot.quantised:
            bad = not all(torch.isfinite(end) for end in tensor.aminmax()) if tensor.numel() else False
        else:
            bad = self.name.endswith("weight_scale") and bool((tensor == _SCALE_NAN).any())
        if bad:
            found = f"{list(tensor.shape)} with values that are NaN or infinite in the part this rank reads"
            raise WeightError([Problem(self.name, self.shard, f"{self.slot.expected()} of finite values", found)])
        return tensor

    def _dtypes(self) -> tuple[str, ...]:
        return _BYTES if self.slot.quantised else _FLOATS


@dataclass(frozen=True)
class WeightPlan:
    """What one process reads from a checkpoint.

    Attributes:
        items: what it reads, in the model's order.
        skipped: why a tensor is left out, to the names of those that are.
        shards: every published name to its shard file.
    """

    items: list[Item]
    skipped: dict[str, list[str]]
    shards: Mapping[str, str]


def plan_weights(
    text: Any, shards: Mapping[str, str], share: Share, vision: Mapping[str, Any] | None = None
) -> WeightPlan:
    """Plan what a process reads.

    Args:
        text: the text config.
        shards: every published name to its shard file. Names may lack the leading ``language_model.``, as those of a
            text-only checkpoint do.
        share: what the process holds of the model.
        vision: the vision config, if the process holds the vision tower; else vision tensors are skipped.

    Raises:
        WeightError: a tensor of the model is missing, or one is not of the model.
        ValueError: the sizes of the parallel groups do not divide what they slice.
    """
    root = _TEXT if any(name.startswith(_TEXT) for name in shards) else ""
    items: list[Item] = []
    skipped: dict[str, list[str]] = {"other pipeline stage": [], "other expert rank": [], "vision": []}
    problems: list[Problem] = []

    def add(name: str, parameter: str, expert: int | None, slot: Slot, why_not: str | None) -> None:
        shard = shards.get(name)
        if shard is None:
            expected = Item(name, "", parameter, expert, slot).expected()
            problems.append(Problem(name, "the index", expected, "no such tensor"))
        elif why_not is None:
            items.append(Item(name, shard, parameter, expert, slot))
        else:
            skipped[why_not].append(name)

    def stage(layer: int) -> str | None:
        return None if layer in share.layers else "other pipeline stage"

    for tail, slot in model_slots(text, share).items():
        # The first stage embeds; the mix, norm and head stand after the last layer.
        beside = 0 if tail == "model.embed_tokens.weight" else text.num_hidden_layers - 1
        add(root + tail, slot.parameter, None, slot, stage(beside))
    expert_table = expert_slots(text, share)
    local = share.experts(text.num_experts)
    for layer in range(text.num_hidden_layers):
        stem = f"model.layers.{layer}."
        for tail, slot in layer_slots(text, share, layer).items():
            add(f"{root}{stem}{tail}", stem + slot.parameter, None, slot, stage(layer))
        if layer < text.first_k_dense_replace:
            continue
        table = [(tail, stem + slot.parameter, slot) for tail, slot in expert_table.items()]
        for expert in range(text.num_experts):
            why_not = stage(layer) or (None if expert in local else "other expert rank")
            name = f"{root}{stem}{EXPERTS}.{expert}."
            for tail, parameter, slot in table:
                add(name + tail, parameter, expert - local.start, slot, why_not)
    if vision is not None:
        for name, slot in vision_slots(vision, share).items():
            add(name, slot.parameter, None, slot, None)
    else:
        skipped["vision"] = [name for name in shards if name.startswith(VISION)]

    known = len(items) + sum(len(names) for names in skipped.values())
    if known < len(shards):
        expected_names = {item.name for item in items}.union(*skipped.values())
        problems += [
            Problem(name, shard, "no such tensor", "a tensor that the model does not have")
            for name, shard in shards.items()
            if name not in expected_names
        ]
    if problems:
        raise WeightError(problems)
    return WeightPlan(items, skipped, shards)


def fill(parameters: Mapping[str, Tensor], tensors: Iterable[tuple[Item, Tensor]]) -> set[str]:
    """Copy slices into a model's parameters.

    Args:
        parameters: by name relative to the text model, of the shapes that :mod:`vllm_kimi_k3.model.layout` gives them.
        tensors: items with this rank's slices.

    Returns:
        the names of the parameters; all of each is filled, an embedding's padding with zeros.

    Raises:
        ValueError: the tensors do not fill a parameter: plan and model disagree.
    """
    filled = dict.fromkeys(parameters, 0)
    for item, tensor in tensors:
        slot, target = item.slot, parameters[item.parameter].data
        whole = target if item.expert is None else target[item.expert]
        part = whole.narrow(slot.dim, slot.row, slot.length)
        part.copy_(tensor.reshape(part.shape))
        filled[item.parameter] += part.numel()
        if slot.form == "vocabulary":
            padding = whole[slot.length :]
            filled[item.parameter] += padding.zero_().numel()
    partly = [name for name, count in filled.items() if count != parameters[name].numel()]
    if partly:
        counts = [f"{name} ({filled[name]} of {parameters[name].numel()} values)" for name in partly[:_SHOWN]]
        raise ValueError(f"the weight plan does not fill {', '.join(counts)}")
    return set(filled)
