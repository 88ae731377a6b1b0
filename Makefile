# Every target does its own set-up: a virtual environment in .venv, installed from requirements/cpu.lock.
PYTHON_VERSION := 3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1
# Without bytecode, each of the many processes that import vLLM spends 20 s more on it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint format lock clean

setup: $(STAMP)

$(STAMP): requirements/cpu.lock pyproject.toml packaging/vllm/pyproject.toml packaging/setup
	bash packaging/setup $(VENV) $(PYTHON_VERSION)
	touch $@

demo: $(STAMP)
	$(PY) -m vllm_kimi_k3.cli.main demo

test: $(STAMP)
	$(PY) -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

lock:
	bash packaging/lock

clean:
	rm -rf $(VENV) build dist *.egg-info
