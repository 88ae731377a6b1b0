"""``vllm-kimi-k3 check``: what will not work, before 1.5 TB are loaded."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

_EPILOG = """
Everything after -- is what would follow `vllm serve`, for example
  vllm-kimi-k3 check --config recipes/tp8-b300.yaml
  vllm-kimi-k3 check -- moonshotai/Kimi-K3 --tensor-parallel-size 8
Exit code: 0 without errors, 1 with errors, 2 if the arguments cannot be read.
"""


def add_parser(subparsers: Any) -> None:
    """Add ``check``."""
    parser = subparsers.add_parser(
        "check",
        help="find what will not work before loading",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="options of vllm serve, as for its --config")
    parser.add_argument("--gpu", help="check for this GPU and not for this machine's; see vllm-kimi-k3 plan --help")
    parser.add_argument("--count", type=int, help="GPUs a node, with --gpu (default: as they are sold)")
    parser.add_argument("--no-files", action="store_true", help="do not look at the files of model and draft")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("arguments", nargs="*", metavar="-- SERVE ARGUMENTS")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from vllm_kimi_k3.plan.gpus import find
    from vllm_kimi_k3.preflight.arguments import ArgumentError
    from vllm_kimi_k3.preflight.finding import as_json
    from vllm_kimi_k3.preflight.inspection import findings, gather
    from vllm_kimi_k3.preflight.machine import described, probe

    try:
        gpu = find(options.gpu) if options.gpu else None
        machine = described(gpu, options.count or gpu.per_node) if gpu else probe()
        arguments = options.arguments[1:] if options.arguments[:1] == ["serve"] else options.arguments
        found = findings(gather(arguments, options.config, machine, os.environ, not options.no_files))
    except (ArgumentError, ValueError) as error:
        print(f"vllm-kimi-k3 check: {error}", file=sys.stderr)
        return 2
    errors = sum(finding.level == "error" for finding in found)
    if options.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        for finding in found:
            print(finding)
        print(f"{errors} errors, {len(found) - errors} warnings")
    return 1 if errors else 0
