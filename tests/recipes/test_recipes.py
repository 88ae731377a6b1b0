"""Every recipe: read by vLLM's own parser, known to both releases, without a finding, with the figures of ``plan``."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.recipes.headers import expectation, hardware, recipe_facts
from vllm_kimi_k3.preflight.arguments import known_options, read_arguments
from vllm_kimi_k3.preflight.inspection import findings

RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
REQUIRED = ("tp8-b300", "tp8-gb300", "tp8-mi355x", "tp16-b200", "tp8pp2-b200", "tp16-h200", "tp8dp2-h200")

recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def parser() -> Any:
    """vLLM's parser of ``vllm serve``."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def test_the_named_targets_are_there_with_and_without_a_draft() -> None:
    names = {path.stem for path in RECIPES}
    assert {name for target in REQUIRED for name in (target, f"{target}-dspark")} <= names
    assert {"nano-cpu", "tp8-b300-1m", "tp8-mi355x-1m", "tp16-b200-1m"} <= names


@recipe
def test_vllms_parser_reads_it_as_we_do(recipe: Path, parser: Any) -> None:
    parsed = vars(parser.parse_args(["--config", str(recipe)]))
    options, unknown = read_arguments([], recipe)
    assert unknown == []
    for name, value in options.items():
        if name == "model" and value is None:
            continue
        known = parsed[name]
        if isinstance(value, dict):
            known = json.loads(known) if isinstance(known, str) else known
            if not isinstance(known, dict):
                # Checked and typed by vLLM already: compare the fields that the recipe gives.
                known = {field: getattr(known, field) for field in value}
            value = {field: str(inner).lower() for field, inner in value.items()}
            known = {field: str(getattr(inner, "name", inner)).lower() for field, inner in known.items()}
        elif isinstance(known, list):
            value = [value]
        assert known == value, name


@recipe
@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_both_releases_know_its_options(recipe: Path, release: str) -> None:
    options, _ = read_arguments([], recipe)
    assert {name.replace("_", "-") for name in options} <= set(known_options(release))


@recipe
def test_check_finds_nothing_but_what_the_header_says(recipe: Path) -> None:
    found = {finding.code for finding in findings(recipe_facts(recipe))}
    says = "Expert parallelism is not in this version" in recipe.read_text()
    assert found == ({"expert-parallel"} if says else set())


@recipe
def test_its_header_says_what_it_was_tested_on_and_what_plan_expects(recipe: Path) -> None:
    text = recipe.read_text()
    assert "# Tested on:" in text and "# Start" in text
    assert f"--config recipes/{recipe.name}" in text
    plan = recipe_facts(recipe).plan
    if hardware(recipe)[0] == "cpu":
        assert plan is None
        return
    assert "argument-checked only" in text.lower()
    assert plan is not None
    assert expectation(plan) in text
    assert plan.fits
