"""The miniature in the published layout: names, bytes, and weights that are worth testing with."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_kimi_k3.nano.checkpoint import build
from vllm_kimi_k3.nano.shape import Shape
from vllm_kimi_k3.reference import load_checkpoint


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nano") / "built", 3, vision=True)


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in path.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def test_same_seed_same_bytes(nano: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", 3, vision=True)
    files = sorted(file.name for file in nano.iterdir())
    assert files == sorted(file.name for file in again.iterdir())
    assert all((nano / name).read_bytes() == (again / name).read_bytes() for name in files)


def test_another_seed_other_weights(nano: Path, tmp_path: Path) -> None:
    other = _tensors(build(tmp_path / "other", 4))
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"
    assert not torch.equal(_tensors(nano)[name], other[name])


def test_names_are_the_published_ones(nano: Path, shared: Path) -> None:
    index = shared / "data" / "checkpoint" / "model.safetensors.index.json.gz"
    published = json.loads(gzip.decompress(index.read_bytes()))["weight_map"]
    ours = json.loads((nano / "model.safetensors.index.json").read_text())["weight_map"]

    def patterns(names: dict[str, str]) -> set[str]:
        return {re.sub(r"(layers|experts|blocks)\.\d+", r"\1.N", name) for name in names}

    assert patterns(ours) == patterns(published)
    assert set(ours) == set(_tensors(nano))


def test_config_has_the_published_fields(nano: Path, shared: Path) -> None:
    published = json.loads((shared / "data" / "checkpoint" / "config.json").read_text())
    ours = json.loads((nano / "config.json").read_text())
    assert set(ours) == set(published)
    for part in ("text_config", "vision_config"):
        assert set(ours[part]) == set(published[part])
    assert ours["text_config"]["quantization_config"] == published["text_config"]["quantization_config"]


def test_stored_types(nano: Path) -> None:
    for name, tensor in _tensors(nano).items():
        if name.endswith(("weight_packed", "weight_scale")):
            assert tensor.dtype == torch.uint8, name
        elif name.endswith(("A_log", "dt_bias", "e_score_correction_bias")):
            assert tensor.dtype == torch.float32, name
        else:
            assert tensor.dtype == torch.bfloat16, name


def test_loads_in_the_reference_with_lively_logits_and_decays(nano: Path) -> None:
    model = load_checkpoint(nano, torch.float32, chunk=16)
    ids = torch.arange(96) * 7
    logits = model.forward(ids)
    assert logits.shape == (96, Shape().vocab_size)
    assert 1.0 < logits.std() < 3.0
    assert logits.argmax(-1).unique().numel() > 40
    decays = []
    for layer in model.config.kda_layers:
        name = f"model.layers.{layer}.self_attn"
        rate = model.weights[f"{name}.A_log"][: model.config.kda_heads].exp()
        bias = model.weights[f"{name}.dt_bias"].view(model.config.kda_heads, -1)
        decays.append(-5.0 * torch.sigmoid(rate[:, None] * bias))
    decay = torch.stack(decays)
    assert decay.min() < -4.5
    assert decay.max() > -2e-4


def test_a_log_is_padded_with_zeros(nano: Path) -> None:
    shape = Shape()
    stored = _tensors(nano)["language_model.model.layers.0.self_attn.A_log"]
    assert stored.numel() == shape.a_log_entries > shape.num_attention_heads
    assert stored[: shape.num_attention_heads].all()
    assert not stored[shape.num_attention_heads :].any()


def test_sizes_can_be_changed(tmp_path: Path) -> None:
    path = build(tmp_path / "small", 0, num_hidden_layers=4, num_experts=4)
    model = load_checkpoint(path, torch.float32)
    assert model.config.kda_layers == {0, 1, 2}
    assert model.forward(torch.tensor([1, 2, 3])).isfinite().all()


def test_an_unknown_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="hidden_sise"):
        build(tmp_path / "wrong", 0, hidden_sise=64)
