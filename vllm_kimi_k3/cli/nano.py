"""``vllm-kimi-k3 nano``: the miniature K3."""

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add ``nano`` and what it can do."""
    parser = subparsers.add_parser("nano", help="build, find and score the miniature K3")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    build = actions.add_parser("build", help="write a random miniature in the published layout")
    build.add_argument("out", type=Path, metavar="OUT", help="directory to write")
    build.add_argument("--seed", type=int, default=0, help="of the weights (default 0)")
    build.add_argument("--vision", action="store_true", help="with the tensors of the vision tower")
    build.set_defaults(run=_build)

    path = actions.add_parser("path", help="print the directory of the trained miniature in the package")
    path.add_argument("--draft", action="store_true", help="of its DSpark draft instead")
    path.set_defaults(run=_path)


def _build(options: argparse.Namespace) -> int:
    from vllm_kimi_k3.nano.checkpoint import build

    print(build(options.out, options.seed, vision=options.vision))
    return 0


def _path(options: argparse.Namespace) -> int:
    from vllm_kimi_k3.nano.packaged import NotPackagedError, draft_path, target_path

    try:
        print(draft_path() if options.draft else target_path())
    except NotPackagedError as error:
        print(f"vllm-kimi-k3 nano path: {error}", file=sys.stderr)
        return 1
    return 0
