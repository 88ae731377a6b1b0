"""``vllm-kimi-k3``: one subcommand a module, imported when it is asked for."""

import argparse
import importlib
import sys
from collections.abc import Sequence

#: subcommand -> what it does; its module is ``vllm_kimi_k3.cli.<subcommand>`` with ``add_parser(subparsers)``.
COMMANDS = {
    "check": "find what will not work before loading",
    "demo": "serve the miniature K3, talk to it and check what it says",
    "nano": "build, find and score the miniature K3",
    "plan": "where every GiB goes on given GPUs, and what fits",
    "verify": "check a running endpoint as a client",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status.

    Each subcommand's parser sets ``run``, a function of the parsed arguments that returns the exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="vllm-kimi-k3")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = arguments[0] if arguments else None
    for name, summary in COMMANDS.items():
        if name == asked:
            importlib.import_module(f"vllm_kimi_k3.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    options = parser.parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
