"""Writing a miniature K3 in the published layout, with random or with given weights."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_kimi_k3.nano.layout import Spec, text_tensors, vision_tensors
from vllm_kimi_k3.nano.shape import Shape, k3_config
from vllm_kimi_k3.nano.vocabulary import write_tokenizer
from vllm_kimi_k3.reference import mxfp4_quantise

_FP32_KINDS = ("a_log", "dt_bias", "router_bias")
_SHARDS = 4
_LOWER_BOUND = -5.0


def build(out: Path, seed: int, *, vision: bool = False, **sizes: int) -> Path:
    """Write a random K3 of a few million parameters; the bytes depend on the arguments alone.

    Logits have a standard deviation of about 2, and the log-decays of KDA cover -5 to -1e-4 a step.

    Args:
        out: directory, made if absent.
        seed: of the weights.
        vision: also write the tensors of the vision tower and projector; the config describes them in any case.
        sizes: fields of :class:`~vllm_kimi_k3.nano.shape.Shape` to change.

    Raises:
        TypeError: ``sizes`` names no field.
    """
    shape = Shape(**sizes)
    specs = text_tensors(shape) | (vision_tensors(shape) if vision else {})
    generator = torch.Generator().manual_seed(seed)
    return write(out, shape, random_weights(shape, specs, generator))


def random_weights(shape: Shape, specs: Mapping[str, Spec], generator: torch.Generator) -> dict[str, Tensor]:
    """fp32 weights for ``specs``, drawn in their order."""

    def normal(size: tuple[int, ...], mean: float, deviation: float) -> Tensor:
        return mean + deviation * torch.randn(size, generator=generator)

    weights: dict[str, Tensor] = {}
    for name, (size, kind) in specs.items():
        if kind in ("linear", "expert"):
            gain = 2.0 if "lm_head" in name else 1.2
            weights[name] = normal(size, 0.0, gain / math.sqrt(math.prod(size[1:])))
        elif kind == "embedding":
            weights[name] = normal(size, 0.0, 1.0)
        elif kind == "norm":
            weights[name] = normal(size, 1.0, 0.2)
        elif kind == "query":
            weights[name] = normal(size, 0.0, 2.0 / math.sqrt(size[-1]))
        elif kind == "conv":
            weights[name] = normal(size, 0.0, 0.6)
        elif kind == "router_bias":
            weights[name] = normal(size, 0.0, 0.1)
        elif kind == "a_log":
            used = normal((shape.num_attention_heads,), 0.0, 0.4)
            weights[name] = torch.cat([used, torch.zeros(size[0] - shape.num_attention_heads)])
        else:
            rate = weights[name.replace("dt_bias", "A_log")][: shape.num_attention_heads].exp()
            weights[name] = decay_bias(torch.rand(size, generator=generator), rate)
    return weights


def decay_bias(uniform: Tensor, rate: Tensor, weakest: float = 1e-4, strongest: float = 4.9) -> Tensor:
    """``dt_bias`` [N*K] whose decays, without input, are spread evenly in the exponent from weakest to strongest.

    Inverts ``-decay = 5 sigmoid(rate * bias)``; ``uniform`` [N*K] is drawn from 0 … 1, ``rate`` is ``exp(A_log)`` [N].
    """
    low, high = math.log(weakest), math.log(strongest)
    share = (low + (high - low) * uniform).exp() / -_LOWER_BOUND
    return (torch.logit(share).view(len(rate), -1) / rate[:, None]).flatten()


def pack(specs: Mapping[str, Spec], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Published tensors as they are stored: bf16, fp32 for decay and router bias, MXFP4 bytes for experts."""
    for name, (_, kind) in specs.items():
        tensor = weights[name].detach().cpu()
        if kind == "expert":
            packed, scale = mxfp4_quantise(tensor)
            yield f"{name}_packed", packed
            yield f"{name}_scale", scale
        else:
            yield name, tensor.to(torch.float32 if kind in _FP32_KINDS else torch.bfloat16)


def write(out: Path, shape: Shape, weights: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint directory: config, shards with index, tokenizer, generation and preprocessor config.

    Args:
        out: directory, made if absent.
        weights: fp32 by published name; experts unpacked, as ``….w1.weight``. Vision tensors may be absent.

    Raises:
        ValueError: a tensor of the text model is missing or has another shape.
    """
    specs = text_tensors(shape)
    if any(name.startswith("vision_tower.") for name in weights):
        specs |= vision_tensors(shape)
    for name, spec in specs.items():
        found = tuple(weights[name].shape) if name in weights else None
        if found != spec.shape:
            raise ValueError(f"{name}: the layout has the shape {spec.shape}, the weights have {found}")
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    special = write_tokenizer(out)
    if special.ranks != shape.ranks:
        raise ValueError(f"the shipped vocabulary has {special.ranks} ranks, the shape asks for {shape.ranks}")
    _write_shards(out, dict(pack(specs, weights)))
    _write_json(out / "config.json", k3_config(shape))
    generation = {"eos_token_id": special.end_of_msg, "temperature": 1.0, "top_p": 1.0}
    _write_json(out / "generation_config.json", generation)
    _write_json(out / "preprocessor_config.json", _PREPROCESSOR)
    return out


def _write_shards(out: Path, tensors: dict[str, Tensor]) -> None:
    """Cut the tensors into shards of about the same size, in their order, and write the index."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(_SHARDS)]
    done = 0
    for name, tensor in tensors.items():
        shards[min(_SHARDS - 1, done * _SHARDS // total)][name] = tensor.contiguous()
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{_SHARDS:06}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        # The writer makes files that only their owner reads.
        (out / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


_PREPROCESSOR: dict[str, Any] = {
    "auto_map": {
        "AutoImageProcessor": "kimi_k3_vision_processing.KimiK3VisionProcessor",
        "AutoProcessor": "kimi_k3_processor.KimiK3Processor",
    },
    "image_processor_type": "KimiK3VisionProcessor",
    "media_proc_cfg": {
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 65536,
        "in_patch_limit_each_frame": 16384,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
        "sample_fps": 8,
        "temporal_merge_kernel_size": 4,
        "transparent_background": {
            "fill": "after_resize",
            "gray": 180,
            "pattern": "chessboard",
            "square": 8,
            "white": 255,
        },
    },
}
