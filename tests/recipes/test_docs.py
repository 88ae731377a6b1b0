"""Every command in the operations and client guides: run, or its arguments checked where it needs other hardware."""

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from vllm_kimi_k3.cli.main import COMMANDS, main
from vllm_kimi_k3.preflight.arguments import read_arguments

PAGES = ("operations.md", "clients.md", "security.md", "licence.md")


def blocks(kind: str) -> list[str]:
    """Lines of all code blocks of a kind on the pages."""
    text = "\n".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)
    return [
        line for block in re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line
    ]


@pytest.mark.parametrize("command", blocks("sh"))
def test_a_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command)
    assert program == "vllm-kimi-k3"
    assert main(arguments) == 0


@pytest.mark.parametrize("command", blocks("text"))
def test_the_arguments_of_a_command_for_other_hardware_are_right(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["vllm", "serve"]:
        options, unknown = read_arguments(words[2:])
        assert unknown == [] and options["model"]
        return
    assert words[0] == "vllm-kimi-k3" and words[1] in COMMANDS
    help_text = (REPOSITORY / "vllm_kimi_k3" / "cli" / f"{words[1]}.py").read_text()
    own = words[2 : words.index("--")] if "--" in words else words[2:]
    assert all(f'"{word}"' in help_text for word in own if word.startswith("--"))
    if "--" in words:
        assert read_arguments(words[words.index("--") + 1 :])[1] == []


def test_pages_link_to_files_that_exist() -> None:
    for page in PAGES:
        text = (REPOSITORY / "docs" / page).read_text()
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (REPOSITORY / "docs" / target).resolve().exists(), f"{page}: {target}"


def test_settings_and_options_on_the_pages_exist() -> None:
    from vllm_kimi_k3.preflight.arguments import known_options
    from vllm_kimi_k3.settings import PREFIX, Settings

    text = "\n".join((REPOSITORY / "docs" / page).read_text() for page in PAGES)
    settings = {PREFIX + name.upper() for name in Settings.__dataclass_fields__}
    assert set(re.findall(rf"{PREFIX}[A-Z_]+", text)) <= settings
    sources = "".join(path.read_text() for path in (REPOSITORY / "vllm_kimi_k3" / "cli").glob("*.py"))
    docker = {"--ipc", "--shm-size"}
    for option in set(re.findall(r"--[a-z][a-z-]+", text)) - docker:
        assert option[2:] in known_options() or f'"{option}"' in sources, option
