"""The weight plan: every published name, every way of sharing a model, and every way a checkpoint can be wrong."""

import gzip
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_kimi_k3.model import shards
from vllm_kimi_k3.model.layout import Share
from vllm_kimi_k3.model.shards import INDEX, check_headers, iterate, read_index
from vllm_kimi_k3.model.weights import Item, WeightError, WeightPlan, fill, plan_weights
from vllm_kimi_k3.nano.checkpoint import build

LAYERS = range(6)
SHAPE = {"num_hidden_layers": len(LAYERS), "hidden_size": 32, "intermediate_size": 64, "q_lora_rank": 16}
KDA, MOE = "language_model.model.layers.1.self_attn", "language_model.model.layers.1.block_sparse_moe"
EXPERT = f"{MOE}.experts.3"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("checkpoint"), 0, vision=True, **SHAPE)


@pytest.fixture(scope="module")
def config(pristine: Path) -> dict[str, Any]:
    return json.loads((pristine / "config.json").read_text())


@pytest.fixture(scope="module")
def text(config: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(**config["text_config"])


@pytest.fixture(scope="module")
def stored(pristine: Path) -> dict[str, Tensor]:
    return {name: tensor for file in pristine.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, stored: dict[str, Tensor]) -> Callable[..., Path]:
    """Writes the checkpoint as one shard and an index, with tensors changed: None takes one away."""

    def write(changes: dict[str, Tensor | None]) -> Path:
        directory = tmp_path_factory.mktemp("changed")
        tensors = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
        save_file(tensors, directory / "a.safetensors")
        index = {"weight_map": dict.fromkeys(tensors, "a.safetensors")}
        (directory / INDEX).write_text(json.dumps(index))
        return directory

    return write


def empty_parameters(plan: WeightPlan, text: Any, experts: int | None = None) -> dict[str, Tensor]:
    """Parameters as the model would have them, filled with what no tensor has."""
    shapes: dict[str, tuple[int, ...]] = {}
    for item in plan.items:
        slot = item.slot
        shape = list(slot.shape)
        shape[slot.dim] = slot.length
        shape[0] += slot.row
        if item.expert is not None:
            shape.insert(0, experts or text.num_experts)
        if slot.form == "conv":
            del shape[-2]
        shapes[item.parameter] = max(tuple(shape), shapes.get(item.parameter, ()))
    quantised = {item.parameter for item in plan.items if item.slot.quantised}
    return {
        name: torch.full(shape, 99, dtype=torch.uint8) if name in quantised else torch.full(shape, torch.nan)
        for name, shape in shapes.items()
    }


def load(directory: Path, text: Any, share: Share, vision: Any = None) -> dict[str, Tensor]:
    plan = plan_weights(text, read_index(directory), share, vision)
    check_headers(plan, directory)
    parameters = empty_parameters(plan, text, len(share.experts(text.num_experts)))
    assert fill(parameters, iterate(plan, directory)) == set(parameters)
    return parameters


def fault(call: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(WeightError) as caught:
        call(*arguments)
    return str(caught.value)


def check(directory: Path, text: Any, share: Share | None = None) -> None:
    check_headers(plan_weights(text, read_index(directory), share or Share(LAYERS)), directory)


# The release.


@pytest.fixture(scope="module")
def release(shared: Path) -> tuple[SimpleNamespace, dict[str, Any], dict[str, Any]]:
    directory = shared / "data" / "checkpoint"
    config = json.loads((directory / "config.json").read_text())
    with gzip.open(directory / "model.safetensors.index.json.gz") as file:
        index = json.load(file)
    return SimpleNamespace(**config["text_config"]), config["vision_config"], index


@pytest.fixture(scope="module")
def release_plan(release: tuple[SimpleNamespace, dict[str, Any], dict[str, Any]]) -> WeightPlan:
    text, vision, index = release
    return plan_weights(text, index["weight_map"], Share(range(93)), vision)


def test_the_release_is_planned_whole_and_fast(release):
    text, vision, index = release
    start = time.process_time()
    plan = plan_weights(text, index["weight_map"], Share(range(93), tp_rank=3, tp_size=8), vision)
    assert time.process_time() - start < 10
    assert len(plan.items) == len(index["weight_map"]) == 497_220
    assert not any(plan.skipped.values())


def test_the_shapes_of_the_release_add_up_to_its_size(release, release_plan):
    """Exact to the byte, with the tensors of KDA and the router below in fp32, A_log 128 long, the rest bf16."""
    fp32 = ("dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")

    def size(item: Item) -> int:
        if item.slot.form == "tail":
            return 128 * 4
        return math.prod(item.slot.shape) * (1 if item.slot.quantised else 4 if item.name.endswith(fp32) else 2)

    assert sum(map(size, release_plan.items)) == release[2]["metadata"]["total_size"]


@pytest.mark.parametrize(("tp", "stages", "ep"), [(16, 1, 1), (8, 2, 1), (8, 1, 8)], ids=["tp16", "tp8pp2", "ep8"])
def test_the_slices_of_the_release(release, tp, stages, ep):
    text, _, index = release
    rank = tp - 1
    bounds = [93 * stage // stages for stage in range(stages + 1)]
    last = Share(range(bounds[-2], 93), rank, tp, rank if ep > 1 else 0, ep)
    plan = plan_weights(text, index["weight_map"], last)
    slots = {item.name: item for item in plan.items}
    root = "language_model.model.layers.92."
    heads, inner = 96 // tp, 3072 // (1 if ep > 1 else tp)
    q_b = slots[f"{root}self_attn.q_b_proj.weight"].slot
    assert (q_b.start, q_b.length) == (rank * heads * 192, heads * 192)
    o = slots[f"{root}self_attn.o_proj.weight"].slot
    assert (o.dim, o.start, o.length) == (1, rank * heads * 128, heads * 128)
    decay = slots["language_model.model.layers.90.self_attn.A_log"].slot
    assert (decay.start, decay.length) == (rank * heads, heads)
    expert = slots[f"{root}block_sparse_moe.experts.895.w3.weight_packed"]
    start = 0 if ep > 1 else rank * inner
    assert (expert.expert, expert.slot.start, expert.slot.length) == (896 // ep - 1, start, inner)
    assert expert.slot.row == inner
    for kind, per_byte in (("packed", 2), ("scale", 32)):
        w2 = slots[f"{root}block_sparse_moe.experts.895.w2.weight_{kind}"].slot
        assert (w2.dim, w2.start, w2.length) == (1, start // per_byte, inner // per_byte)
    assert len(plan.skipped["vision"]) == 168
    assert bool(plan.skipped["other pipeline stage"]) == (stages > 1)
    assert len(plan.skipped["other expert rank"]) == 92 * 6 * (896 - 896 // ep)
    assert len(plan.items) + sum(map(len, plan.skipped.values())) == 497_220


def test_latent_projections_are_not_quantised(release_plan):
    quantised = {item.name.rsplit(".", 1)[1] for item in release_plan.items if item.slot.quantised}
    assert quantised == {"weight_packed", "weight_scale"}
    latent = [item for item in release_plan.items if "routed_expert_" in item.name]
    assert len(latent) == 3 * 92 and not any(item.slot.quantised for item in latent)


# Slices.


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_of_all_ranks_make_the_tensor(pristine, text, stored, size):
    parts: dict[str, list[tuple[Item, Tensor]]] = defaultdict(list)
    for rank in range(size):
        plan = plan_weights(text, read_index(pristine), Share(LAYERS, rank, size))
        for item, tensor in iterate(plan, pristine):
            parts[item.name].append((item, tensor.clone()))
    assert len(parts) == sum(name.startswith("language_model.") for name in stored)
    replicated = set()
    for name, pieces in parts.items():
        slot, whole = pieces[0][0].slot, stored[name]
        if slot.form == "tail":
            whole = whole[: slot.shape[0]]
        if slot.length == whole.shape[slot.dim]:
            replicated.add(name.rsplit(".", 2)[-2])
            assert all(torch.equal(tensor, whole) for _, tensor in pieces)
        else:
            assert torch.equal(torch.cat([tensor for _, tensor in pieces], dim=slot.dim), whole)
    if size > 1:
        assert {"q_proj", "o_proj", "w1", "w2", "lm_head", "down_proj", "b_proj"}.isdisjoint(replicated)
        assert {"f_a_proj", "q_a_proj", "gate", "norm", "routed_expert_up_proj", "o_norm"} <= replicated


@pytest.mark.parametrize("rank", [0, 1])
def test_fused_parameters_hold_their_parts_in_order(pristine, text, stored, rank):
    got = load(pristine, text, Share(LAYERS, rank, 2))

    def half(name: str, dim: int = 0) -> Tensor:
        return stored[name].float().chunk(2, dim)[rank]

    parts = [half(f"{KDA}.{name}_proj.weight") for name in "qkvg"]
    parts += [stored[f"{KDA}.f_a_proj.weight"].float(), half(f"{KDA}.b_proj.weight")]
    assert torch.equal(got["model.layers.1.self_attn.in_proj.weight"], torch.cat(parts))
    conv = torch.cat([half(f"{KDA}.{name}_conv1d.weight") for name in "qkv"]).squeeze(1)
    assert torch.equal(got["model.layers.1.self_attn.conv_weight"], conv)
    mla = "language_model.model.layers.3.self_attn"
    parts = [stored[f"{mla}.{name}.weight"].float() for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    parts.append(half(f"{mla}.g_proj.weight"))
    assert torch.equal(got["model.layers.3.self_attn.in_proj.weight"], torch.cat(parts))
    shared = f"{MOE}.shared_experts"
    parts = [stored[f"{MOE}.routed_expert_down_proj.weight"].float()]
    parts += [half(f"{shared}.gate_proj.weight"), half(f"{shared}.up_proj.weight")]
    assert torch.equal(got["model.layers.1.block_sparse_moe.in_proj.weight"], torch.cat(parts))
    down = half(f"{shared}.down_proj.weight", 1)
    assert torch.equal(got["model.layers.1.block_sparse_moe.shared_down_proj.weight"], down)
    for kind in ("weight_packed", "weight_scale"):
        experts = "model.layers.1.block_sparse_moe.experts"
        pair = [stored[f"{EXPERT}.{matrix}.{kind}"].chunk(2)[rank] for matrix in ("w1", "w3")]
        assert torch.equal(got[f"{experts}.w13_{kind}"][3], torch.cat(pair))
        assert torch.equal(got[f"{experts}.w2_{kind}"][3], stored[f"{EXPERT}.w2.{kind}"].chunk(2, 1)[rank])


def test_experts_over_ranks(pristine, text, stored):
    got = load(pristine, text, Share(LAYERS, tp_rank=1, tp_size=2, ep_rank=1, ep_size=2))
    experts = got["model.layers.1.block_sparse_moe.experts.w2_weight_packed"]
    for local in range(4):
        assert torch.equal(experts[local], stored[f"{MOE}.experts.{4 + local}.w2.weight_packed"])


def test_pipeline_stages_make_the_model(pristine, text):
    index = read_index(pristine)
    stages = [plan_weights(text, index, Share(layers)) for layers in (range(2), range(2, 5), range(5, 6))]
    names = [item.name for plan in stages for item in plan.items]
    assert sorted(names) == sorted(name for name in index if name.startswith("language_model."))
    first, middle, last = ({item.name for item in plan.items if "layers" not in item.name} for plan in stages)
    assert first == {"language_model.model.embed_tokens.weight"} and not middle
    assert {name.split(".")[-2] for name in last} == {"lm_head", "norm", "output_attn_res_norm", "output_attn_res_proj"}


def test_a_vocabulary_off_the_padding(pristine, text, checkpoint):
    small = SimpleNamespace(**vars(text) | {"vocab_size": 100})
    rows = torch.randn(100, 32).bfloat16()
    names = ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight")
    directory = checkpoint(dict.fromkeys(names, rows.clone()) | {names[1]: rows.clone()})
    plan = plan_weights(small, read_index(directory), Share(LAYERS, 1, 2))
    parameters = empty_parameters(plan, small)
    parameters["lm_head.weight"] = torch.full((64, 32), torch.nan)
    fill(parameters, iterate(plan, directory))
    assert torch.equal(parameters["lm_head.weight"][:36], rows[64:].float())
    assert (parameters["lm_head.weight"][36:] == 0).all()


def test_vision_is_read_when_it_is_held(pristine, config, text, stored):
    got = load(pristine, text, Share(LAYERS), config["vision_config"])
    vision = [name for name in stored if name.startswith(("vision_tower.", "mm_projector."))]
    assert vision
    for name in vision:
        assert torch.equal(got[name], stored[name].float())


def test_names_of_a_text_only_checkpoint(tmp_path, text, stored):
    bare = {name.removeprefix("language_model."): t for name, t in stored.items() if name.startswith("language_model.")}
    save_file(bare, tmp_path / "model.safetensors")
    got = load(tmp_path, text, Share(LAYERS))
    assert torch.equal(got["model.norm.weight"], stored["language_model.model.norm.weight"].float())


def test_two_dimensional_convolution_and_longer_decay(checkpoint, text, stored):
    conv, decay = f"{KDA}.q_conv1d.weight", f"{KDA}.A_log"
    heads = stored[decay][:4]
    directory = checkpoint({conv: stored[conv].squeeze(1).clone(), decay: torch.cat([heads, torch.full((7,), 3.0)])})
    got = load(directory, text, Share(LAYERS))
    assert torch.equal(
        got["model.layers.1.self_attn.conv_weight"][: stored[conv].shape[0]], stored[conv].squeeze(1).float()
    )
    assert torch.equal(got["model.layers.1.self_attn.A_log"], heads)


@pytest.mark.parametrize("share", [Share(LAYERS), Share(LAYERS, 1, 2)], ids=["tp1", "tp2"])
@pytest.mark.parametrize("window", [0, 20_000, 1 << 40])
def test_the_system_is_told_of_every_slice_before_it_comes(pristine, text, share, window, monkeypatch):
    monkeypatch.setattr(shards, "_AHEAD", window)
    told: list[tuple[str, int, int]] = []

    def posix_fadvise(descriptor: int, start: int, length: int, _: int) -> None:
        told.append((Path(f"/proc/self/fd/{descriptor}").resolve().name, start, start + length))

    monkeypatch.setattr(shards.os, "posix_fadvise", posix_fadvise)
    plan = plan_weights(text, read_index(pristine), share)
    taken = 0
    for item, tensor in iterate(plan, pristine):
        data = (pristine / item.shard).read_bytes()
        wanted = tensor[:1].contiguous().view(torch.uint8).numpy().tobytes()
        spans = [data[start:end] for shard, start, end in told if shard == item.shard]
        assert any(wanted in span for span in spans), item.name
        taken += tensor.nbytes
    if share.tp_size == 1:
        assert sum(end - start for _, start, end in told) == taken
    else:
        # A slice of columns lies in all of its tensor.
        columns = sum(math.prod(item.slot.shape) * 4 for item in plan.items if item.slot.dim)
        assert taken < sum(end - start for _, start, end in told) <= taken + columns


# What is wrong with a checkpoint.


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{KDA}.q_proj.weight", "[256, 32]"),
        (f"{EXPERT}.w1.weight_scale", "[128, 2] U8"),
        (f"{KDA}.A_log", "[4] or longer"),
        ("language_model.model.norm.weight", "[32]"),
        ("language_model.lm_head.weight", "[1280, 32]"),
    ],
)
def test_a_missing_tensor(checkpoint, text, name, shape):
    message = fault(check, checkpoint({name: None}), text)
    assert f"{name} in the index: expected {shape}" in message and "1 tensor at fault" in message


def test_a_missing_tensor_of_another_stage_or_expert_rank_stops_every_rank(checkpoint, text):
    directory = checkpoint({f"{EXPERT}.w1.weight_packed": None})
    for share in (Share(range(3, 6)), Share(LAYERS, ep_rank=1, ep_size=2)):
        assert f"{EXPERT}.w1.weight_packed" in fault(check, directory, text, share)


def test_missing_tensors_are_all_counted(checkpoint, text, stored):
    gone = dict.fromkeys(name for name in stored if ".experts." in name)
    with pytest.raises(WeightError) as caught:
        check(checkpoint(gone), text)
    assert len(caught.value.problems) == len(gone) == 5 * 8 * 6
    assert f"and {len(gone) - 20} more" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{KDA}.q_a_proj.weight",
        f"{MOE}.experts.8.w1.weight_packed",
        "language_model.model.layers.6.input_layernorm.weight",
        f"{MOE}.routed_expert_down_proj.weight_packed",
        "model.norm.bias",
    ],
)
def test_an_unknown_tensor(checkpoint, text, name):
    message = fault(check, checkpoint({name: torch.zeros(2)}), text)
    assert f"{name} in a.safetensors: expected no such tensor" in message and "1 tensor at fault" in message


@pytest.mark.parametrize(
    ("name", "tensor", "expected", "found"),
    [
        (f"{KDA}.q_proj.weight", torch.zeros(32, 256), "[256, 32] BF16 or F16 or F32", "[32, 256] F32"),
        (f"{KDA}.A_log", torch.zeros(3), "[4] or longer", "[3] F32"),
        (f"{KDA}.k_conv1d.weight", torch.zeros(256, 4, 1), "[256, 1, 4] or [256, 4]", "[256, 4, 1] F32"),
        (f"{EXPERT}.w2.weight_packed", torch.zeros(64, 64), "[64, 64] U8", "[64, 64] F32"),
        (f"{EXPERT}.w2.weight_scale", torch.zeros(64, 2, dtype=torch.uint8), "[64, 4] U8", "[64, 2] U8"),
        (f"{KDA}.o_norm.weight", torch.zeros(64, dtype=torch.int64), "[64] BF16", "[64] I64"),
    ],
)
def test_a_wrong_shape_or_type(checkpoint, text, name, tensor, expected, found):
    message = fault(check, checkpoint({name: tensor}), text)
    assert f"{name} in a.safetensors: expected {expected}" in message and f"found {found}" in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [f"{KDA}.q_proj.weight", f"{KDA}.A_log", "language_model.lm_head.weight"])
def test_a_value_that_is_not_finite(checkpoint, text, stored, name, value):
    bad = stored[name].clone()
    bad.view(-1)[1] = value
    message = fault(load, checkpoint({name: bad}), text, Share(LAYERS))
    assert f"{name} in a.safetensors" in message and "NaN or infinite" in message


def test_a_scale_that_means_nan(checkpoint, text, stored):
    name = f"{EXPERT}.w3.weight_scale"
    bad = stored[name].clone()
    bad[5, 0] = 255
    assert f"{name} in a.safetensors" in fault(load, checkpoint({name: bad}), text, Share(LAYERS))


def test_padding_past_the_heads_may_be_anything(checkpoint, text, stored):
    padded = torch.cat([stored[f"{KDA}.A_log"][:4], torch.full((4,), torch.nan)])
    load(checkpoint({f"{KDA}.A_log": padded}), text, Share(LAYERS))


def test_a_tensor_that_is_not_where_the_index_says(checkpoint, text, stored):
    directory = checkpoint({})
    save_file(
        {"language_model.model.norm.weight": stored["language_model.model.norm.weight"]}, directory / "b.safetensors"
    )
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["language_model.model.norm.weight"] = "b.safetensors"
    index["weight_map"]["language_model.lm_head.weight"] = "b.safetensors"
    (directory / INDEX).write_text(json.dumps(index))
    message = fault(check, directory, text)
    assert "language_model.lm_head.weight in b.safetensors: expected [1280, 32]" in message
    # The first file still holds both.
    assert message.count("in a.safetensors: expected only tensors that the index puts there") == 2


def test_a_shard_that_is_missing(pristine, text, checkpoint):
    directory = checkpoint({})
    (directory / "a.safetensors").unlink()
    assert "a.safetensors: expected a file that can be read, found No such file" in fault(check, directory, text)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda data: data[:-1], "as its header says, found"),
        (lambda data: data + b"\0", "as its header says, found"),
        (lambda data: data[:100], "do not begin with one"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "do not begin with one"),
        (lambda data: b"", "do not begin with one"),
    ],
    ids=["cut", "longer", "header cut", "lfs pointer", "empty"],
)
def test_a_shard_that_is_damaged(checkpoint, text, damage, found):
    directory = checkpoint({})
    file = directory / "a.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    message = fault(check, directory, text)
    assert "a.safetensors" in message and found in message


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"x": 1}}', "{}"])
def test_an_index_that_is_damaged(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    assert INDEX in fault(read_index, tmp_path)


def test_a_directory_without_weights(tmp_path):
    assert "model.safetensors: expected a file that can be read" in fault(read_index, tmp_path)


# What is wrong with the model or the way it is shared.


def test_a_parameter_that_nothing_fills(pristine, text):
    plan = plan_weights(text, read_index(pristine), Share(LAYERS))
    parameters = empty_parameters(plan, text) | {"model.extra": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"model\.extra \(0 of 3 values\)"):
        fill(parameters, iterate(plan, pristine))


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (Share(LAYERS, tp_size=3), "tensor-parallel size 3 does not divide the padded vocabulary, 1280"),
        (Share(LAYERS, tp_size=8), "tensor-parallel size 8 does not divide the groups of 32"),
        (Share(LAYERS, ep_size=3), "expert-parallel size 3 does not divide num_experts, 8"),
    ],
)
def test_sizes_that_do_not_divide(pristine, text, share, message):
    with pytest.raises(ValueError, match=message):
        plan_weights(text, read_index(pristine), share)
