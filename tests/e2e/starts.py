"""How an engine starts on each of some checkpoints, in a process of its own.

usage: python -m tests.e2e.starts OUT_JSON CHECKPOINT...
"""

import json
import sys
from pathlib import Path

from tests.e2e.driver import Engine, prompt


def start(checkpoint: Path) -> dict[str, str]:
    """The type and text of the error that an engine on the checkpoint ends with; none if it answers."""
    from vllm.distributed import cleanup_dist_env_and_memory

    try:
        engine = Engine(checkpoint, dtype="float32")
        engine.run([prompt(5)])
        engine.close()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    finally:
        cleanup_dist_env_and_memory()
    return {}


def main(out: str, *checkpoints: str) -> None:
    Path(out).write_text(json.dumps([start(Path(checkpoint)) for checkpoint in checkpoints]))


if __name__ == "__main__":
    main(*sys.argv[1:])
