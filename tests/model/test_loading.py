"""Loading through vLLM's loaders: the plugin reads slices itself, or takes whole tensors as they come."""

import importlib.util
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.model.test_weights import empty_parameters
from vllm_kimi_k3.model import loading
from vllm_kimi_k3.model.layout import Share
from vllm_kimi_k3.model.shards import read_index
from vllm_kimi_k3.model.weights import WeightError, plan_weights
from vllm_kimi_k3.nano.checkpoint import build

QUERY = "language_model.model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("loading"), 0, num_hidden_layers=4, hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="module")
def text(directory: Path) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((directory / "config.json").read_text())["text_config"])


def whole(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors, a file at a time, as a loader that reads files whole gives them."""
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        for name in list(tensors):
            yield name, tensors.pop(name)


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2)], ids=["tp1", "tp2-0", "tp2-1"])
def load(request: pytest.FixtureRequest, directory: Path, text: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads by a format from a stream, on one rank, and gives the parameters."""
    rank, size = request.param
    monkeypatch.setattr(loading, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(loading, "get_tensor_model_parallel_world_size", lambda: size)

    def call(form: str, stream: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
        layers = range(text.num_hidden_layers)
        plan = plan_weights(text, read_index(directory), Share(layers, rank, size))
        parameters = empty_parameters(plan, text)
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(model=str(directory), hf_text_config=text),
            load_config=SimpleNamespace(load_format=form),
        )
        assert loading.load_weights(parameters, layers, config, stream) == set(parameters)
        return parameters

    return call


def never() -> Iterator[tuple[str, Tensor]]:
    """A loader that must not be asked."""
    raise AssertionError("vLLM's loader was asked for a tensor")
    yield


@pytest.mark.parametrize("form", ["auto", "hf", "safetensors"])
def test_vllms_default_loader_is_not_asked_for_a_tensor(load: Any, form: str) -> None:
    load(form, never())


def test_whole_tensors_fill_what_slices_fill(load: Any, directory: Path) -> None:
    direct, streamed = load("auto", never()), load("fastsafetensors", whole(directory))
    backwards = load("fastsafetensors", reversed(list(whole(directory))))
    for name, tensor in direct.items():
        assert torch.equal(streamed[name], tensor) and torch.equal(backwards[name], tensor), name


def test_one_tensor_of_the_stream_is_alive_at_a_time(load: Any, directory: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole(directory):
            assert sum(one() is not None for one in alive[:-1]) == 0
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    load("fastsafetensors", watched())
    assert len(alive) > 100


def test_what_the_stream_leaves_out_is_named(load: Any, directory: Path) -> None:
    with pytest.raises(WeightError, match=f"{QUERY} in model-.*found nothing from the loader"):
        load("fastsafetensors", (pair for pair in whole(directory) if pair[0] != QUERY))


def test_a_value_that_is_not_finite_is_found_in_the_stream(load: Any, directory: Path) -> None:
    def spoilt() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in whole(directory):
            yield name, torch.full_like(tensor, torch.nan) if name == QUERY else tensor

    with pytest.raises(WeightError, match=f"{QUERY} in .*NaN or infinite"):
        load("fastsafetensors", spoilt())


@pytest.mark.skipif(not importlib.util.find_spec("fastsafetensors"), reason="pip install fastsafetensors")
def test_fastsafetensors_itself(load: Any, directory: Path) -> None:
    """As vLLM drives it, but on CPU, where vLLM's own way names a CUDA device."""
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    files = [str(file) for file in sorted(directory.glob("*.safetensors"))]
    loader = ParallelLoader(
        pg=SingleGroup(), hf_weights_files=files, queue_size=0, use_tqdm_on_load=False, device="cpu", nogds=True
    )
    streamed, direct = load("fastsafetensors", iter(loader.iterate_weights())), load("auto", never())
    loader.close()
    assert all(torch.equal(streamed[name], tensor) for name, tensor in direct.items())
