"""``vllm-kimi-k3 plan``: where every GiB goes, and what fits."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_kimi_k3.plan.gpus import GIB, GPUS


def add_parser(subparsers: Any) -> None:
    """Add ``plan``."""
    parser = subparsers.add_parser("plan", help="where every GiB goes on given GPUs, and what fits")
    parser.add_argument("--gpu", required=True, help=f"{', '.join(GPUS)}, or a size such as 141GiB")
    parser.add_argument("--count", type=int, help="GPUs in all (default: what the layout takes, or one node)")
    parser.add_argument("--tensor-parallel-size", "--tp", type=int, help="default: the GPUs that are left")
    parser.add_argument("--pipeline-parallel-size", "--pp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--dp", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true", help="whole experts on each rank")
    parser.add_argument("--kv-cache-dtype", default="bf16", help="bf16, fp8 or fp8_ds_mla (default bf16)")
    parser.add_argument("--draft", help="a published draft, for example Inferact/Kimi-K3-DSpark")
    parser.add_argument("--num-speculative-tokens", type=int, help="default: what the draft was trained for")
    parser.add_argument("--context", type=int, default=131072, help="tokens of a request (default 131072)")
    parser.add_argument("--requests", type=int, default=1, help="how many of them at once (default 1)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.92)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--mamba-ssm-cache-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--no-enable-prefix-caching", action="store_true")
    parser.add_argument("--language-model-only", action="store_true", help="without the vision tower")
    parser.add_argument("--workspace-gib", type=float, help="measured activations and workspaces, not the estimate")
    parser.add_argument("--cache-gib", type=float, help="size of the cache on a GPU, not what is left over")
    parser.add_argument("--model", type=Path, help="directory of a K3 checkpoint (default: the published sizes)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from vllm_kimi_k3.plan.memory import Plan
    from vllm_kimi_k3.plan.picture import as_svg
    from vllm_kimi_k3.plan.table import as_json, as_text

    try:
        plan = Plan(_deployment(options))
        text = json.dumps(as_json(plan), indent=2) if options.json else as_text(plan)
        if options.svg:
            options.svg.write_text(as_svg(plan))
    except (ValueError, OSError) as error:
        print(f"vllm-kimi-k3 plan: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0 if plan.fits else 1


def _deployment(options: argparse.Namespace) -> Any:
    from vllm_kimi_k3.plan import release
    from vllm_kimi_k3.plan.gpus import find
    from vllm_kimi_k3.plan.memory import Deployment

    text, vision = release.TEXT, release.VISION
    if options.model:
        config = json.loads((options.model / "config.json").read_text())
        text, vision = SimpleNamespace(**config["text_config"]), config["vision_config"]
    draft = None
    if options.draft:
        draft = release.DRAFTS.get(options.draft)
        if draft is None:
            raise ValueError(f"--draft {options.draft!r}: expected one of {', '.join(release.DRAFTS)}")
    return Deployment(
        gpu=find(options.gpu),
        layout=_layout(options),
        kv_dtype=options.kv_cache_dtype,
        draft=draft,
        drafts=options.num_speculative_tokens or (draft.tokens if draft else 0),
        context=options.context,
        requests=options.requests,
        utilisation=options.gpu_memory_utilization,
        batched_tokens=options.max_num_batched_tokens,
        seqs=options.max_num_seqs,
        prefix_caching=not options.no_enable_prefix_caching,
        state_width=2 if options.mamba_ssm_cache_dtype == "bfloat16" else 4,
        pool=_bytes(options.cache_gib),
        workspace=_bytes(options.workspace_gib),
        text=text,
        vision=None if options.language_model_only else vision,
    )


def _layout(options: argparse.Namespace) -> Any:
    """The layout that the flags give, the tensor-parallel size filled in.

    Raises:
        ValueError: it does not take the GPUs that ``--count`` says there are.
    """
    from vllm_kimi_k3.plan.gpus import find
    from vllm_kimi_k3.plan.parallel import Layout

    others = options.pipeline_parallel_size * options.data_parallel_size
    tp = options.tensor_parallel_size
    if tp is None:
        tp = max((options.count or find(options.gpu).per_node) // others, 1)
    layout = Layout(tp, options.pipeline_parallel_size, options.data_parallel_size, options.enable_expert_parallel)
    if options.count and layout.gpus != options.count:
        raise ValueError(f"{layout} takes {layout.gpus} GPUs, --count says {options.count}")
    return layout


def _bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)
