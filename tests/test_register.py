"""What the entry point does, each time in a fresh process as vLLM does it."""

import subprocess
import sys

import pytest

from vllm_kimi_k3.compat.version import version_problem
from vllm_kimi_k3.settings import SettingError, read

PRELUDE = """
import logging, sys
logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
import vllm, vllm.version
from vllm.logger import init_logger
logging.getLogger("vllm").propagate = True
"""
SHOW = """
from vllm import ModelRegistry
print(ModelRegistry.models["KimiK3ForConditionalGeneration"].module_name)
"""


def python(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_it_overrides_vllms_model_says_so_once_and_imports_nothing_heavy() -> None:
    code = """
import vllm_kimi_k3
before = set(sys.modules)
vllm_kimi_k3.register(); vllm_kimi_k3.register()
print("heavy:", [m for m in set(sys.modules) - before if m.startswith(("vllm_kimi_k3.model", "numba", "triton"))])
"""
    printed = python(PRELUDE + code + SHOW)
    assert "vllm_kimi_k3.model.k3" in printed
    assert printed.count("INFO vllm-kimi-k3 0.1.0 registered") == 1
    assert "heavy: []" in printed


def test_an_unsupported_vllm_gets_one_warning_and_goes_on_alone() -> None:
    code = """
vllm.__version__ = "0.31.0"
import vllm_kimi_k3
vllm_kimi_k3.register(); vllm_kimi_k3.register()
"""
    printed = python(PRELUDE + code + SHOW)
    assert printed.count("WARNING vllm-kimi-k3") == 1
    assert ">=0.32,<0.34" in printed
    assert "vllm_kimi_k3.model" not in printed.replace("vllm_kimi_k3.model.k3:", "")


def test_it_can_be_switched_off() -> None:
    printed = python(PRELUDE + "import vllm_kimi_k3\nvllm_kimi_k3.register()\n" + SHOW, VLLM_KIMI_K3_DISABLE="1")
    assert "switched off by VLLM_KIMI_K3_DISABLE" in printed
    assert "vllm_kimi_k3.model.k3" not in printed


def test_vllms_own_model_class_can_be_chosen() -> None:
    code = "import vllm_kimi_k3\nvllm_kimi_k3.register()\nfrom vllm.tool_parsers import ToolParserManager as m\n"
    show = 'print(m.lazy_parsers["kimi_k3"])\n' + SHOW
    printed = python(PRELUDE + code + show, VLLM_KIMI_K3_MODEL="vllm")
    assert "vllm.models.kimi_k3" in printed
    assert "vllm_kimi_k3.model.k3" not in printed
    assert "vllm_kimi_k3.chat.vllm_parsers" in printed


def test_an_unknown_model_class_is_refused() -> None:
    with pytest.raises(SettingError, match="VLLM_KIMI_K3_MODEL='vlm': expected plugin or vllm"):
        _ = read({"VLLM_KIMI_K3_MODEL": "vlm"}).own_model


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.0", "0.33.1rc1"])
def test_supported_versions(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_unsupported_versions_name_the_range(version: str) -> None:
    problem = version_problem(version)
    assert problem is not None and ">=0.32,<0.34" in problem
