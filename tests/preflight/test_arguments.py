"""Reading ``vllm serve`` arguments: as vLLM's parser does, on everything it and we both read."""

from pathlib import Path
from typing import Any

import pytest

from vllm_kimi_k3.preflight.arguments import ArgumentError, known_options, read_arguments


def test_the_recorded_options_are_those_of_the_installed_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    real = {name[2:]: action.nargs == 0 for action in actions for name in action.option_strings if name[:2] == "--"}
    recorded = known_options("0.32")
    for name, flag in real.items():
        if name == "help":
            continue
        positive = name.removeprefix("no-") if name.startswith("no-") and name not in recorded else name
        assert recorded[positive] == flag, name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m"], {"model": "m"}),
        (["m", "-tp", "8", "-pp=2"], {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}),
        (["--enable-prefix-caching", "m"], {"enable_prefix_caching": True, "model": "m"}),
        (["m", "--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["m", "--max_model_len", "4096"], {"max_model_len": 4096}),
        (["m", "--kv-cache-dtype=fp8"], {"kv_cache_dtype": "fp8"}),
        (["m", "--speculative-config", '{"method":"dspark"}'], {"speculative_config": {"method": "dspark"}}),
        (
            ["m", "--speculative-config.method", "dspark", "--speculative-config.num_speculative_tokens", "7"],
            {"speculative_config": {"method": "dspark", "num_speculative_tokens": 7}},
        ),
        (["m", "--gpu-memory-utilization", "0.9"], {"gpu_memory_utilization": 0.9}),
    ],
)
def test_arguments(arguments: list[str], expected: dict[str, Any]) -> None:
    options, unknown = read_arguments(arguments)
    assert options | expected == options
    assert unknown == []


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: a\ntensor-parallel-size: 8\nenable-prefix-caching: true\n")
    options, _ = read_arguments(["b", "--tensor-parallel-size", "16"], file)
    assert options == {"model": "b", "tensor_parallel_size": 16, "enable_prefix_caching": True}
    assert read_arguments(["--config", str(file)])[0]["model"] == "a"


def test_unknown_options_are_told() -> None:
    assert read_arguments(["m", "--tensor-paralel-size", "8"])[1] == ["tensor-paralel-size"]


@pytest.mark.parametrize(
    ("content", "message"), [("- a\n", "found list"), ("a: [", "not YAML"), (None, "No such file")]
)
def test_a_file_that_cannot_be_read(content: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ArgumentError, match=message):
        read_arguments([], file)


def test_a_value_without_an_option() -> None:
    with pytest.raises(ArgumentError, match="'again': the model is 'm' already"):
        read_arguments(["m", "again"])
