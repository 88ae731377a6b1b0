"""Decode and prefill of K3 in vLLM's engine on one GPU: this plugin's model and vLLM's own, side by side.

    python benchmarks/engine.py [--layers 24] [--slices 8 16] [--models plugin vllm] [--experts 896] [--json FILE]

The model is what one tensor-parallel rank of 8 or 16 holds of every layer, at K3's true sizes: random weights, MXFP4
experts, the rest bf16. Routing depends on the token, as in a trained model; with plain dummy weights all tokens choose
the same experts and every batch looks faster than it is. Each model runs in a process of its own, with the same engine
settings. Decode is the time of 256 steps, best of three; prefill the time to the first token, best of three.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES, PROMPTS, STEPS = (1, 4, 16, 64), (1000, 8000, 16000), 256
#: E8M0 of 2^-7, which keeps the experts' outputs about as large as their inputs.
SCALE = 120


def slice_config(ranks: int, layers: int, experts: int) -> dict[str, Any]:
    """config.json of a text model that is one rank's part of K3."""
    heads = 96 // ranks
    full = [layer for layer in range(1, layers + 1) if layer % 4 == 0 or layer == layers]
    linear = {
        "num_heads": heads,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "full_attn_layers": full,
        "kda_layers": [layer for layer in range(1, layers + 1) if layer not in full],
    }
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 163840 // ranks,
        "hidden_size": 7168,
        "intermediate_size": 33792 // ranks,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "tie_word_embeddings": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": linear,
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": experts,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072 // ranks,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "latent_moe_use_norm": True,
        "routed_expert_hidden_size": 3584,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "quantization_config": {"quant_method": "mxfp4", "format": "mxfp4-pack-quantized"},
    }


def spread(model: Any) -> str:
    """Give a model with dummy weights values of a trained one's size; runs in the worker. Names the model's class."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(0)
    for name, tensor in [*model.named_parameters(), *_marlin_scales(model)]:
        if "scale" in name and tensor.element_size() == 1:
            tensor.data.view(torch.uint8).fill_(SCALE)
        elif "norm" in name:
            tensor.data.fill_(1.0)
        elif "embed_tokens" in name:
            tensor.data.normal_(0, 1, generator=generator)
        elif name.endswith("gate.weight"):
            tensor.data.normal_(0, 0.02, generator=generator)
        elif "e_score_correction_bias" in name:
            tensor.data.zero_()
    return f"{type(model).__module__}.{type(model).__name__}"


def _marlin_scales(model: Any) -> list[tuple[str, Any]]:
    packed = [module.marlin for module in model.modules() if getattr(module, "marlin", None) is not None]
    return [(f"{name}_scale", getattr(part, f"{name}_scale")) for part in packed for name in ("w13", "w2")]


def measure(ranks: int, layers: int, experts: int, batches: list[int], prompts: list[int]) -> dict[str, Any]:
    """Start an engine in this process and time it; milliseconds."""
    import random

    from vllm import LLM, SamplingParams

    directory = tempfile.mkdtemp()
    Path(directory, "config.json").write_text(json.dumps(slice_config(ranks, layers, experts)))
    began = time.perf_counter()
    llm = LLM(
        directory,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=20000,
        kv_cache_memory_bytes=8 << 30,
        max_num_seqs=max(batches),
        max_num_batched_tokens=8192,
        cudagraph_capture_sizes=sorted(batches),
    )
    found: dict[str, Any] = {"class": llm.apply_model(spread)[0], "start_s": time.perf_counter() - began}
    print("started", found, flush=True)
    vocabulary = 163840 // ranks
    random.seed(0)

    def seconds(count: int, length: int, new: int) -> float:
        tokens = [[random.randrange(100, vocabulary) for _ in range(length)] for _ in range(count)]
        # Sampled, so that requests do not walk in step.
        parameters = SamplingParams(max_tokens=new, temperature=1.0, detokenize=False, ignore_eos=True)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in tokens], parameters, use_tqdm=False)
        return time.perf_counter() - start

    def best(run: Callable[[], float], times: int = 3) -> float:
        return min(run() for _ in range(times))

    for batch in batches:
        seconds(batch, 64, 8)
        step = best(lambda batch=batch: (seconds(batch, 64, STEPS + 1) - seconds(batch, 64, 1)) / STEPS)
        found[f"decode_{batch}"] = 1000 * step
        print(f"decode_{batch}", 1000 * step, flush=True)
    for length in prompts:
        seconds(1, length, 1)
        found[f"prefill_{length}"] = 1000 * best(lambda length=length: seconds(1, length, 1))
        print(f"prefill_{length}", found[f"prefill_{length}"], flush=True)
    return found


def child(arguments: argparse.Namespace, model: str, ranks: int) -> dict[str, Any]:
    """Measure in a process of its own; an error's last lines instead of times where it fails."""
    unused = {"VLLM_KIMI_K3_GEMM_AR": "0", "VLLM_ENABLE_GEMM_RS": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    environment = unused | dict(os.environ)
    environment |= {"VLLM_KIMI_K3_MODEL": model, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, "--child", out.name, "--slices", str(ranks)]
        command += ["--layers", str(arguments.layers), "--experts", str(arguments.experts)]
        command += ["--batches", *map(str, arguments.batches), "--prompts", *map(str, arguments.prompts)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            return {"error": (done.stdout + done.stderr)[-3000:]}
        return json.loads(out.read())


def table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds of both models and their ratio, a line a case."""
    lines = [f"{'slice':6} {'case':14} " + " ".join(f"{row:>10}" for row in ("plugin", "vllm", "ratio"))]
    for ranks in sorted({row["ranks"] for row in rows}):
        by_model = {row["model"]: row for row in rows if row["ranks"] == ranks}
        cases = [key for row in by_model.values() for key in row if key.startswith(("decode_", "prefill_"))]
        for case in dict.fromkeys(cases):
            own, theirs = (by_model.get(model, {}).get(case) for model in ("plugin", "vllm"))
            ratio = f"{theirs / own:10.2f}" if own and theirs else ""
            shown = " ".join(f"{value:10.2f}" if value else f"{'-':>10}" for value in (own, theirs))
            lines.append(f"TP{ranks:<4} {case:14} {shown} {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--slices", type=int, nargs="+", default=[8, 16], help="how many ranks a slice is one of")
    parser.add_argument("--models", nargs="+", default=["plugin", "vllm"])
    parser.add_argument("--batches", type=int, nargs="*", default=list(BATCHES))
    parser.add_argument("--prompts", type=int, nargs="*", default=list(PROMPTS))
    parser.add_argument("--json", type=Path, help="also write the rows there")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        sizes = (arguments.slices[0], arguments.layers, arguments.experts)
        arguments.child.write_text(json.dumps(measure(*sizes, arguments.batches, arguments.prompts)))
        return
    rows = []
    for ranks in arguments.slices:
        for model in arguments.models:
            row = {"model": model, "ranks": ranks, "layers": arguments.layers} | child(arguments, model, ranks)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
