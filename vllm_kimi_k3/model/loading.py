"""Filling the vLLM model from a checkpoint, as the weight plan says."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from vllm_kimi_k3.compat.processes import end_with_parent
from vllm_kimi_k3.model.layout import Share
from vllm_kimi_k3.model.progress import planned_bytes, watched
from vllm_kimi_k3.model.shards import check_headers, iterate, read_index
from vllm_kimi_k3.model.weights import Item, Problem, WeightError, WeightPlan, fill, plan_weights

#: Load formats of vLLM that read safetensors files from a directory, which the plan can read slice by slice itself.
_DIRECT_FORMATS = ("auto", "hf", "safetensors")


def load_weights(
    parameters: Mapping[str, Tensor],
    layers: range,
    vllm_config: VllmConfig,
    weights: Iterable[tuple[str, Tensor]],
    vision: Mapping[str, Any] | None = None,
) -> set[str]:
    """Fill the parameters of this rank and stage.

    Names, shapes and types of the whole checkpoint are checked before anything is copied. With vLLM's default loader
    only this rank's bytes are read; with any other, the tensors come from ``weights``, one alive at a time.

    Args:
        parameters: by name as in :mod:`vllm_kimi_k3.model.layout`: the text model's, and the tower's if it is here.
        layers: the layers of this pipeline stage.
        vllm_config: vLLM's.
        weights: published names and whole tensors, from vLLM's loader.
        vision: the vision config, if the process holds the vision tower.

    Returns:
        the names of the parameters that were filled, which are all.

    Raises:
        WeightError: the checkpoint does not fit the model.
    """
    end_with_parent()
    share = Share(
        layers=layers,
        tp_rank=get_tensor_model_parallel_rank(),
        tp_size=get_tensor_model_parallel_world_size(),
    )
    stream = iter(weights)
    directory = Path(vllm_config.model_config.model)
    if not directory.is_dir():
        # vLLM downloads a model when the first tensor is asked for.
        stream = chain([next(stream)], stream)
        directory = _snapshot(vllm_config)
    plan = plan_weights(vllm_config.model_config.hf_text_config, read_index(directory), share, vision)
    check_headers(plan, directory)
    direct = vllm_config.load_config.load_format in _DIRECT_FORMATS
    tensors = iterate(plan, directory) if direct else _from_stream(plan, stream)
    if share.tp_rank == 0 and layers.start == 0:
        tensors = watched(tensors, planned_bytes(plan.items))
    return fill(parameters, tensors)


def _snapshot(vllm_config: VllmConfig) -> Path:
    """Where a downloaded model lies."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            vllm_config.model_config.model,
            revision=vllm_config.model_config.revision,
            cache_dir=vllm_config.load_config.download_dir,
            local_files_only=True,
        )
    )


def _from_stream(plan: WeightPlan, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Item, Tensor]]:
    """This rank's slices of the tensors that a loader of vLLM's gives, checked."""
    items = {item.name: item for item in plan.items}
    for name, tensor in stream:
        item = items.pop(name, None)
        if item is not None:
            yield item, item.checked(item.take(tensor))
    if items:
        raise WeightError(
            [Problem(item.name, item.shard, item.expected(), "nothing from the loader") for item in items.values()]
        )
