# Each target sets up what it needs: a virtual environment in .venv, filled anew only when pyproject.toml changed.
# Needed before: make, and Python 3.11 or newer with venv.
#
#   make setup PYTHON=/path/to/python3.12       another Python
#   make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"      another build of torch

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
TORCH := torch==2.13.0
TORCH_ARGS ?=
PYTEST_ARGS ?=
DEMO_DIR := runs/demo

# The first that runs and is new enough; a name on PATH may be a shim without a Python behind it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick lint check bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with everything that the other targets need

# torch comes first and alone, and is named again beside the rest, so that pip never replaces it.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer on PATH"; \
		echo "  try:   install one, or name it: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "error: $(PYTHON) cannot make a virtual environment"; \
		echo "  try:   install its venv module (python3-venv on Debian), or another with PYTHON="; exit 1; }
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install --quiet "$(TORCH)" -e ".[dev,hf]"
	@touch $(READY)

demo: $(READY)  ## plan, then train a small GPT on two processes (about two minutes)
	$(BIN)/apportion plan examples/text.py --devices local:2
	@rm -rf $(DEMO_DIR)
	$(BIN)/apportion train examples/text.py --devices local:2 --steps 200 --run-dir $(DEMO_DIR)
	@echo "The run is in $(DEMO_DIR); open $(DEMO_DIR)/report.html in a browser."

test: $(READY)  ## run every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

quick: $(READY)  ## run the tests that need neither several processes nor long (under two minutes)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

lint: $(READY)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint  ## lint, and the unit, property and habits tests
	$(BIN)/python -m pytest tests/unit tests/property tests/habits $(PYTEST_ARGS)

bench: $(READY)  ## run every benchmark and print its table
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean:  ## remove the environment and what tools left behind; runs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
