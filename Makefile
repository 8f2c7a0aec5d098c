# `make` alone lists what there is. Everything runs from .venv, which `make setup` fills.

VENV ?= .venv
BIN := $(VENV)/bin
# The python that .venv is made with; 3.11 or newer.
PYTHON ?= python3
# More words for pip, such as --index-url for a machine without a GPU (see docs/development.md).
PIP_FLAGS ?=

# The rooms lie at the top of the repository under bare names that are never imported: keep the folder off sys.path.
export PYTHONSAFEPATH := 1
# Tools that start other tools (ninja, ray, redis-server) find them in the same place.
export PATH := $(abspath $(BIN)):$(PATH)

# gRPC reports each stream that a peer ends, which tests do on purpose.
GRPC_VERBOSITY ?= ERROR
export GRPC_VERBOSITY

STAMP := $(VENV)/.up-to-date

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format proto clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install everything into .venv; does nothing when it is up to date

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh scripts/prebuild_ops.py
	@PYTHON="$(PYTHON)" PIP_FLAGS="$(PIP_FLAGS)" scripts/setup.sh $(VENV)
	@touch $@

demo: setup ## start a small cluster on this machine, put requests through it, show what speculation did
	@$(BIN)/python examples/demo.py

test: setup ## run the tests; ARGS="tests/unit -x" narrows them
	@$(BIN)/python -m pytest -q $(ARGS)

lint: setup ## check style, types, imports between rooms, the protocol and its generated stubs
	@scripts/lint.sh

format: setup ## let ruff lay out the code and mend what it can
	@$(BIN)/ruff format && $(BIN)/ruff check --fix

proto: setup ## generate src/outrider/v1 from proto/
	@scripts/proto.sh

clean: ## remove .venv and everything that tools left behind
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
