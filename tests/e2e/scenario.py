"""A fixed set of requests on an engine of its own, in a process of its own.

usage: python -m tests.e2e.scenario CHECKPOINT SETTINGS_JSON LENGTHS_JSON OUT_JSON
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.e2e.driver import Answer, Engine, prompt

#: prompts of all kinds, in tokens
MIXED = (300, 17, 700, 64, 129, 900, 2, 400)
#: prompts that all outgrow their first page of 256 tokens while they are answered
GROWING = (245, 246, 247, 248, 249, 250, 251, 252)
NEW = 20


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed=9) for length in lengths]


def preemptions(engine: Engine) -> int:
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")


def main(checkpoint: str, settings: str, lengths: str, out: str) -> None:
    engine = Engine(Path(checkpoint), disable_log_stats=False, **json.loads(settings))
    requests = prompts(json.loads(lengths))
    answers = engine.run(requests, new=NEW)
    report: dict[str, Any] = {
        "answers": [dataclasses.asdict(answer) for answer in answers],
        "again": [dataclasses.asdict(answer) for answer in engine.run(requests, new=NEW)],
        "preemptions": preemptions(engine),
    }
    Path(out).write_text(json.dumps(report))
    engine.close()


def load(path: Path) -> tuple[list[Answer], list[Answer], int]:
    """Answers, the answers to the same requests again, and how often a request was preempted."""
    report = json.loads(path.read_text())
    return [Answer(**a) for a in report["answers"]], [Answer(**a) for a in report["again"]], report["preemptions"]


if __name__ == "__main__":
    main(*sys.argv[1:])
