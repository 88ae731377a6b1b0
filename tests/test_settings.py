"""Settings come from the environment, typed, with a message that names a bad value."""

import pytest

from vllm_kimi_k3.settings import SettingError, Settings, read


def test_defaults() -> None:
    assert read({}) == Settings()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("ON", True), ("0", False), ("no", False)])
def test_booleans(text: str, value: bool) -> None:
    assert read({"VLLM_KIMI_K3_DISABLE": text}).disable is value


def test_a_bad_value_is_named() -> None:
    with pytest.raises(SettingError, match="VLLM_KIMI_K3_DISABLE='perhaps'"):
        read({"VLLM_KIMI_K3_DISABLE": "perhaps"})


def test_variables_of_vllms_own_k3_are_left_alone() -> None:
    assert read({"VLLM_KIMI_K3_GEMM_AR": "0"}) == Settings()
