"""Planted mistakes, each found with its fix, and nothing found where nothing is wrong."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.preflight.conftest import DRAFT, facts, node
from vllm_kimi_k3.plan.gpus import Gpu, find
from vllm_kimi_k3.preflight.checkpoint import Checkpoint, inspect
from vllm_kimi_k3.preflight.facts import Facts
from vllm_kimi_k3.preflight.inspection import findings
from vllm_kimi_k3.preflight.machine import Machine

FP8 = {"use_prefill_query_quantization": True, "mla_prefill_backend": "FLASHINFER"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@dataclass
class Mistake:
    """What is planted, and what must be found.

    Attributes:
        code, fix: of the finding; ``fix`` is a part of it.
        machine: the node.
        options, environ: what differs from the deployment without fault.
        level: of the finding.
        also: other errors that follow from it.
    """

    code: str
    fix: str
    options: dict[str, Any] = field(default_factory=dict)
    machine: Machine = field(default_factory=node)
    environ: dict[str, str] = field(default_factory=dict)
    level: str = "error"
    also: frozenset[str] = frozenset()


def draft(**changes: Any) -> dict[str, Any]:
    config = DRAFT | changes
    return {"speculative_config": {k: v for k, v in config.items() if v is not None}}


MISTAKES = {
    "nccl that hangs on b300": Mistake("nccl-nvls-hang", "nvidia-nccl-cu13==2.28.9", machine=node(nccl=(2, 30, 7))),
    "nccl that may hang on b200": Mistake(
        "nccl-nvls-hang",
        "2.28.9",
        {"pipeline_parallel_size": 2, "nnodes": 2},
        node("b200", nccl=(2, 30, 4)),
        level="warning",
    ),
    "nccl that may hang on b300": Mistake("nccl-nvls-hang", "2.28.9", machine=node(nccl=(2, 32, 3)), level="warning"),
    "driver too old for cuda 13": Mistake("driver", "release 580", machine=node(driver=(570, 124))),
    "cuda too old": Mistake("cuda-version", "CUDA 13", machine=node(cuda=(12, 8))),
    "a100": Mistake(
        "gpu-architecture",
        "H100 or later",
        machine=node(gpus=(Gpu("a100", 80 << 30, "sm80", 8),) * 8),
        also=frozenset({"weights-do-not-fit"}),
    ),
    "mi300x": Mistake("lossy-experts", "MI355X", machine=node("mi325x", driver=None, cuda=None), level="warning"),
    "too few gpus": Mistake("too-few-gpus", "--nnodes 2", {"tensor_parallel_size": 16}),
    "no nvlink": Mistake(
        "all-reduce-over-pcie", "--disable-custom-all-reduce", machine=node(nvlink=False), level="warning"
    ),
    "docker's shared memory": Mistake("shared-memory", "--ipc=host", machine=node(shm=64 << 20)),
    "fastsafetensors absent": Mistake(
        "fastsafetensors", "pip install", {"load_format": "fastsafetensors"}, node(packages={"vllm": "0.33.0"})
    ),
    "fastsafetensors without a gpu": Mistake(
        "fastsafetensors",
        "leave --load-format out",
        {"load_format": "fastsafetensors", "tensor_parallel_size": 1},
        node("b300", 0, memory=512 << 30),
        also=frozenset({"weights-do-not-fit"}),
    ),
    "vllm too old": Mistake("vllm-version", "vllm>=0.33", machine=node(packages={"vllm": "0.29.0"})),
    "vllm absent": Mistake("vllm-version", "pip install", machine=node(packages={})),
    "fp8 rows on hopper": Mistake(
        "fp8-kv-on-hopper",
        "leave --kv-cache-dtype out",
        {"kv_cache_dtype": "fp8", "pipeline_parallel_size": 2, "nnodes": 2, "attention_config": FP8},
        node("h200"),
    ),
    "fp8 rows without a prefill backend": Mistake(
        "fp8-kv-prefill",
        "mla_prefill_backend",
        {"kv_cache_dtype": "fp8", "attention_config": {"use_prefill_query_quantization": True}},
    ),
    "nvfp4 rows": Mistake("kv-dtype", "fp8", {"kv_cache_dtype": "nvfp4"}),
    "flashmla on rocm": Mistake(
        "attention-backend", "ROCM_AITER_MLA", {"attention_backend": "FLASHMLA"}, node("mi355x", driver=None, cuda=None)
    ),
    "renamed variable": Mistake(
        "renamed-variable", "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", environ={"AITER_SITUV2_A8W4": "1"}, level="warning"
    ),
    "plugin off": Mistake("plugin-disabled", "unset", environ={"VLLM_KIMI_K3_DISABLE": "1"}, level="warning"),
    "tensor-parallel size": Mistake("tensor-parallel-size", "4, 6, 8", {"tensor_parallel_size": 7}),
    "expert-parallel size": Mistake(
        "expert-parallel-size",
        "divides it",
        {"data_parallel_size": 3, "nnodes": 3, "enable_expert_parallel": True},
    ),
    "prefill context parallel": Mistake(
        "prefill-context-parallel", "leave it out", {"prefill_context_parallel_size": 2}
    ),
    "layer partition": Mistake(
        "layer-partition",
        "add up to 93",
        {"pipeline_parallel_size": 2, "nnodes": 2},
        environ={"VLLM_PP_LAYER_PARTITION": "46,46"},
    ),
    "prefix caching left out": Mistake(
        "prefix-caching-off", "--enable-prefix-caching", {"enable_prefix_caching": None}, level="warning"
    ),
    "prefix caching off": Mistake(
        "prefix-caching-off", "--enable-prefix-caching", {"enable_prefix_caching": False}, level="warning"
    ),
    "no chunked prefill": Mistake(
        "chunked-prefill-off", "--no-enable-chunked-prefill out", {"enable_chunked_prefill": False}
    ),
    "cache mode that is gone": Mistake("mamba-cache-mode", "leave it out", {"mamba_cache_mode": "all"}),
    "cache mode none": Mistake("mamba-cache-mode", "leave it out", {"mamba_cache_mode": "none"}),
    "match unit": Mistake("prefix-match-unit", "128", {"prefix_match_unit": 100}),
    "block size": Mistake("block-size", "leave it out", {"block_size": 256}, level="warning"),
    "retention interval": Mistake("retention-interval", "1536", {"prefix_cache_retention_interval": 1000}),
    "fp16 state": Mistake("state-dtype", "bfloat16", {"mamba_ssm_cache_dtype": "float16"}),
    "hybrid manager off": Mistake("hybrid-manager-off", "leave it out", {"disable_hybrid_kv_cache_manager": True}),
    "replayssm alone": Mistake("replayssm-without-draft", "leave it out", {"use_replayssm": True}),
    "lmcache chunk": Mistake("lmcache-chunk", "LMCACHE_CHUNK_SIZE=768", {"kv_transfer_config": LMCACHE}),
    "lmcache without prefix caching": Mistake(
        "connector-without-prefix-caching",
        "--enable-prefix-caching",
        {"kv_transfer_config": LMCACHE, "enable_prefix_caching": None},
        environ={"LMCACHE_CHUNK_SIZE": "768"},
    ),
    "nixl layout": Mistake(
        "conv-state-layout",
        "VLLM_SSM_CONV_STATE_LAYOUT=DS",
        {"kv_transfer_config": {"kv_connector": "NixlConnector"}},
    ),
    "context above the model's": Mistake(
        "max-model-len", "1048576", {"max_model_len": 2_000_000}, also=frozenset({"context-does-not-fit"})
    ),
    "context that is no number": Mistake("max-model-len", "auto", {"max_model_len": "long"}),
    "tokenizer mode": Mistake("tokenizer-mode", "leave it out", {"tokenizer_mode": "slow"}),
    "tool parser of another model": Mistake(
        "tool-call-parser", "--tool-call-parser kimi_k3", {"tool_call_parser": "hermes"}
    ),
    "tool parser left out": Mistake(
        "tool-call-parser-missing", "--tool-call-parser kimi_k3", {"tool_call_parser": None}, level="warning"
    ),
    "reasoning parser of another model": Mistake(
        "reasoning-parser", "--reasoning-parser kimi_k3", {"reasoning_parser": "deepseek_r1"}
    ),
    "reasoning parser left out": Mistake(
        "reasoning-parser-missing", "--reasoning-parser kimi_k3", {"reasoning_parser": None}, level="warning"
    ),
    "auto tool choice": Mistake(
        "auto-tool-choice", "--enable-auto-tool-choice", {"enable_auto_tool_choice": None}, level="warning"
    ),
    "chat template": Mistake("chat-template", "leave it out", {"chat_template": "k3.jinja"}),
    "remote code": Mistake("trust-remote-code", "leave it out", {"trust_remote_code": True}, level="warning"),
    "draft of another method": Mistake("draft-method", "dspark", draft(method="eagle3")),
    "draft tokens left out": Mistake("draft-tokens", '"num_speculative_tokens": 7', draft(num_speculative_tokens=None)),
    "draft tokens above the block": Mistake("draft-tokens", ": 7", draft(num_speculative_tokens=9)),
    "draft that is not served": Mistake(
        "draft-unsupported", "Inferact/Kimi-K3-DSpark", draft(model="RadixArk/Kimi-K3-DSpark")
    ),
    "block rejection of greedy drafts": Mistake(
        "draft-sampling", "probabilistic", draft(draft_sample_method=None), level="warning"
    ),
    "synthetic acceptance": Mistake(
        "synthetic-acceptance", '"block"', draft(rejection_sample_method="synthetic"), level="warning"
    ),
    "draft backend of blackwell on hopper": Mistake(
        "draft-backend", "TRITON_MLA", draft() | {"pipeline_parallel_size": 2, "nnodes": 2}, node("h200")
    ),
    "draft without a backend on hopper": Mistake(
        "draft-backend",
        "TRITON_MLA",
        draft(attention_backend=None) | {"pipeline_parallel_size": 2, "nnodes": 2},
        node("h200"),
    ),
    "adaptive verification over stages": Mistake(
        "adaptive-verification",
        "leave it out",
        draft(enable_adaptive_verification=True) | {"pipeline_parallel_size": 2, "nnodes": 2},
    ),
    "first model runner": Mistake("draft-runner", "unset", draft(), environ={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "one node of b200": Mistake("weights-do-not-fit", "16 GPUs", machine=node("b200")),
    "no gpu": Mistake(
        "weights-do-not-fit", "--gpu b300", {"tensor_parallel_size": 1}, node("b300", 0, memory=512 << 30)
    ),
    "context beyond the cache": Mistake(
        "context-does-not-fit",
        "--max-model-len auto",
        {"max_model_len": 1 << 20, "gpu_memory_utilization": 0.76},
    ),
    "all of the memory": Mistake("memory-utilisation", "0.97", {"gpu_memory_utilization": 0.995}, level="warning"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_with_its_fix(name: str) -> None:
    mistake = MISTAKES[name]
    found = [f for f in findings(facts(mistake.machine, mistake.environ, **mistake.options)) if f.code == mistake.code]
    assert len(found) == 1
    assert found[0].level == mistake.level
    assert mistake.fix in found[0].fix
    assert found[0].what and found[0].why


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_raises_no_other_error(name: str) -> None:
    mistake = MISTAKES[name]
    found = findings(facts(mistake.machine, mistake.environ, **mistake.options))
    assert {f.code for f in found if f.level == "error"} <= {mistake.code} | mistake.also


SOUND = {
    "tp8 b300": facts(),
    "draft": facts(**draft()),
    "redhat draft": facts(**draft(model="RedHatAI/Kimi-K3-speculator.dspark", num_speculative_tokens=8)),
    "flat draft flags": facts(spec_method="dspark", spec_model="Inferact/Kimi-K3-DSpark", spec_tokens=7),
    "fp8 rows": facts(kv_cache_dtype="fp8", attention_config=FP8, max_model_len=1 << 20),
    "two nodes of h200": facts(node("h200"), pipeline_parallel_size=2, nnodes=2),
    "draft on hopper": facts(node("h200"), pipeline_parallel_size=2, nnodes=2, **draft(attention_backend="TRITON_MLA")),
    "mi355x": facts(node("mi355x", driver=None, cuda=None, nccl=None, nvlink=None)),
    "lmcache": facts(kv_transfer_config=LMCACHE, environ={"LMCACHE_CHUNK_SIZE": "768"}),
    "nixl": facts(kv_transfer_config={"kv_connector": "NixlConnector"}, environ={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
    "nccl that hangs, on hopper": facts(node("h200", nccl=(2, 30, 7)), pipeline_parallel_size=2, nnodes=2),
    "length auto": facts(max_model_len="auto"),
    "unit": facts(prefix_match_unit=64),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_alarm_where_nothing_is_wrong(name: str) -> None:
    assert findings(SOUND[name]) == []


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    one = facts()
    found = findings(replace(one, serving=replace(one.serving, unknown=("tensor-paralel-size",))))
    assert [(f.code, f.fix) for f in found] == [("unknown-option", "--tensor-parallel-size")]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden_size": 4096}, "hidden_size is 4096"),
        ({"vocab_size": 32000}, "vocab_size is 32000"),
        ({"target_layer_ids": [2, 23, 47, 71, 93]}, "target_layer_ids is"),
        ({"target_layer_ids": None}, "target_layer_ids is None"),
        ({"mask_token_id": 163840}, "mask_token_id is 163840"),
        ({"mla_use_nope": True}, "mla_use_nope is True"),
        ({"rope_parameters": None}, "rope_parameters is None"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1"),
        ({"block_size": 5}, "block is 5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_draft_that_breaks_its_contract(
    changes: dict[str, Any], what: str, draft_directory: Callable[..., Path]
) -> None:
    directory = draft_directory(**changes)
    found = findings(_with_draft(directory))
    assert [f.code for f in found] == ["draft-contract"]
    assert what in found[0].what


def test_a_draft_as_published_keeps_its_contract(draft_directory: Callable[..., Path]) -> None:
    assert findings(_with_draft(draft_directory())) == []


def test_a_draft_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "Kimi-K3-DSpark").mkdir()
    found = findings(_with_draft(tmp_path / "Kimi-K3-DSpark"))
    assert {f.code for f in found} == {"draft-files"}


def _with_draft(directory: Path) -> Facts:
    one = facts(**draft(model=str(directory)))
    return replace(one, draft=inspect(str(directory), {}, measure=False))


def _with(checkpoint: Path | Checkpoint) -> list[Any]:
    """Findings for serving a miniature on CPU."""
    one = facts(Machine(memory=16 << 30), tensor_parallel_size=1, max_model_len=None)
    looked_at = checkpoint if isinstance(checkpoint, Checkpoint) else inspect(str(checkpoint), {})
    return findings(replace(one, checkpoint=looked_at))


def test_a_whole_checkpoint_is_in_order(checkpoint: Path) -> None:
    assert _with(checkpoint) == []


def test_a_missing_shard(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[1]
    shard.unlink()
    [found] = _with(checkpoint)
    assert found.code == "shards-missing"
    assert shard.name in found.what and shard.name in found.fix


def test_a_shard_cut_short(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1000])
    [found] = _with(checkpoint)
    assert (found.code, shard.name in found.what) == ("shards-damaged", True)


def test_a_pointer_in_place_of_a_shard(checkpoint: Path) -> None:
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 16000000000\n")
    [found] = _with(checkpoint)
    assert found.code == "shards-damaged"


def test_shards_of_another_revision(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"total_size": ', '"total_size": 9'))
    [found] = _with(checkpoint)
    assert found.code == "index-size"


def test_a_tensor_that_the_index_promises_is_not_there(checkpoint: Path) -> None:
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model.norm.weight", "model.norm.wait"))
    [found] = _with(checkpoint)
    assert (found.code, "norm.wait" in found.what) == ("shards-damaged", True)


def test_no_vocabulary(checkpoint: Path) -> None:
    (checkpoint / "tiktoken.model").unlink()
    [found] = _with(checkpoint)
    assert found.code == "tokenizer-file"


def test_another_model(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace('"model_type": "kimi_k3"', '"model_type": "qwen3"'))
    assert [found.code for found in _with(checkpoint)] == ["not-k3"]


def test_a_config_that_is_no_json(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    assert "config" in [found.code for found in _with(checkpoint)]


def test_no_room_to_download() -> None:
    one = replace(facts(), checkpoint=Checkpoint("moonshotai/Kimi-K3", free=10**12))
    [found] = findings(one)
    assert (found.code, "1454 GiB" in found.why) == ("disk-space", True)


def test_a_disk_too_slow_for_the_timeout(checkpoint: Path) -> None:
    slow = replace(inspect(str(checkpoint), {}), rate=1000.0)
    [found] = _with(slow)
    assert (found.code, found.level) == ("slow-disk", "warning")
    assert "VLLM_ENGINE_READY_TIMEOUT_S=" in found.fix


def test_gpu_memory_is_that_of_the_node_and_not_of_the_table() -> None:
    small = replace(find("b300"), memory=150 << 30)
    assert [f.code for f in findings(facts(node(gpus=(small,) * 8)))] == ["weights-do-not-fit"]


def test_at_least_25_kinds_of_mistake_are_planted() -> None:
    assert len({mistake.code for mistake in MISTAKES.values()}) >= 25
