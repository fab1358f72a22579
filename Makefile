# Sets up everything in .venv and runs the commands of daily work; `make` alone lists them.
# Needs Python 3.11 or later, make and git, and no root. What is installed is pinned in constraints.txt.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard proto/kvoy/v1/*.proto)
GENERATED := kvoy/v1/__init__.py
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt

# An extra package index for torch. On Linux, TORCH_INDEX=https://download.pytorch.org/whl/cpu gives the CPU build
# (200 MB); without it pip may choose the CUDA build (several GB), which runs as well.
TORCH_INDEX ?=

# Of test: what computes goes beside what starts pods and servers.
LANES ?= 2

# Random episodes of each round of test-faults.
EPISODES ?= 500

.PHONY: help demo test test-faults test-kernels lint format proto golden breaking compile-kernels device-check venv clean distclean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: venv ## Start a whole cluster, ask it a question, show what it did
	@$(BIN)/kvoy demo

test: venv ## Run every test, in two lanes (LANES=0: one after the other, where you can debug)
	@$(BIN)/python -m pytest -n $(LANES) --dist loadgroup $(ARGS)

test-faults: venv ## Kill, cut, slow down and damage: real pods, the real model, 500 random episodes, three times in a row
	@for round in 1 2 3; do \
	  KVOY_FAULTS=long KVOY_FAULT_EPISODES=$(EPISODES) $(BIN)/python -m pytest tests/faults $(ARGS) || exit 1; \
	done

test-kernels: venv ## Run the tests of the Triton kernels in Triton's interpreter
	@TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels_triton $(ARGS)

compile-kernels: venv ## Compile every Triton kernel for sm_80 and sm_90, without a GPU
	@$(BIN)/python -m kernels.compile $(ARGS)

lint: venv ## Check style, types, import rules and protobuf files
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint

format: venv ## Bring the code into the house's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(INSTALLED) ## Generate kvoy/v1 from proto/ anew
	@$(BIN)/python setup.py --quiet proto

golden: venv ## Rewrite the expected transcripts of tests/golden; review the diff
	@KVOY_REWRITE_GOLDEN=1 $(BIN)/python -m pytest tests/golden

breaking: venv ## Say whether proto/ breaks what main promises
	@$(BIN)/buf breaking --against '.git#branch=main'

device-check: ## Say whether the kernels are right and how fast they are on this machine's GPU (needs torch and triton only)
	@$(firstword $(wildcard $(BIN)/python) python3) -m bench.device_check $(ARGS)

venv: $(INSTALLED) $(GENERATED) ## Only set up .venv
	@:

$(INSTALLED): pyproject.toml setup.py constraints.txt
	@echo "kvoy: setting up $(VENV); the first time takes a few minutes"
	@test -x $(BIN)/python || { \
	  for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; else python=; fi; \
	  done; \
	  test -n "$$python" || { echo "kvoy: no Python 3.11 or later on PATH; install one and run make again." >&2; exit 1; }; \
	  echo "kvoy: using $$($$python --version) ($$(command -v $$python))"; \
	  $$python -m venv $(VENV); }
	@$(PIP) setuptools grpcio-tools mypy-protobuf
	@$(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) --no-build-isolation -e '.[local,cpu,dev]'
	@touch $@

$(GENERATED): $(PROTOS) | $(INSTALLED)
	@$(BIN)/python setup.py --quiet proto

clean: ## Remove what building and testing leave behind
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## And the environment and the generated code
	rm -rf $(VENV) kvoy/v1
