"""``vllm-kimi-k3 nano``: the miniature K3."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kimi_k3.nano.exam import Question, Reply

#: Room for the exam's longest documents.
CONTEXT = 8192


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

    score = actions.add_parser("score", help="ask a served miniature the exam's questions and print a score card")
    score.add_argument(
        "--url", help="of the server, such as http://127.0.0.1:8000; the packaged one is served if absent"
    )
    score.add_argument("--questions", type=_positive, default=200, help="a skill (default 200)")
    score.add_argument("--json", action="store_true", help="print the card as JSON")
    score.add_argument("--failed", action="store_true", help="also print answers that do not count, to stderr")
    score.set_defaults(run=_score)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} questions: ask at least one")
    return number


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


def _score(options: argparse.Namespace) -> int:
    import openai

    from vllm_kimi_k3.cli.server import ServerError
    from vllm_kimi_k3.nano.packaged import NotPackagedError
    from vllm_kimi_k3.nano.score import HEADING, as_json, as_line, score

    rows = []
    try:
        with _served(options.url) as url:
            if not options.json:
                print(HEADING)
            for row in score(url, options.questions, failed=_show if options.failed else None):
                rows.append(row)
                if not options.json:
                    print(as_line(row), flush=True)
    except (NotPackagedError, ServerError, openai.OpenAIError) as error:
        print(f"vllm-kimi-k3 nano score: {options.url or 'own server'}: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(as_json(rows))
    return 0 if all(row.passed for row in rows) else 1


@contextlib.contextmanager
def _served(url: str | None) -> Iterator[str]:
    """A given server, or one with the packaged miniature for the while."""
    from vllm_kimi_k3.cli.server import Server, chat_options
    from vllm_kimi_k3.nano.packaged import target_path

    if url is not None:
        yield url.rstrip("/").removesuffix("/v1")
        return
    with Server(target_path(), chat_options("nano", CONTEXT), environment={"VLLM_CPU_KVCACHE_SPACE": "1"}) as server:
        yield server.url


def _show(question: "Question", reply: "Reply") -> None:
    print(f"{question.row}\n    wanted {question.expected}\n    got    {reply}", file=sys.stderr)
