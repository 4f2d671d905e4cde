# `make demo` and `make test` need Python >= 3.11 and nothing else: they make .venv themselves.

# The first of these that is Python >= 3.11 makes the virtual environment.
PYTHON ?= python3.11 python3
# For the program that a target runs: make test ARGS="-k layout -x"
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
# Touched when the environment is complete, so the second `make` starts at once.
STAMP := $(VENV)/.complete

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-node-loss demo-jax faults test lint format bench bench-jax notebooks docs soak wheel clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

setup: $(STAMP) ## Make the virtual environment .venv

demo: $(STAMP) ## Train a small GPT, kill it twice, go on from memory; then lose a node
	$(PY) examples/train_gpt.py $(ARGS)
	$(PY) examples/node_loss.py

demo-node-loss: $(STAMP) ## Lose one node of three with its memory, go on from the copies
	$(PY) examples/node_loss.py $(ARGS)

demo-jax: $(STAMP) ## Train a small Flax GPT through Orbax, kill it twice, lose a node
	$(PY) examples/train_flax.py $(ARGS)

# Two workers are enough: much of a test's time is that of processes which start, and all share one memory.
test: lint ## Lint, check types, run the tests
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(STAMP) ## Check style and types
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

format: $(STAMP) ## Rewrite the sources in the project's style
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

bench: $(STAMP) ## Measure saving and loading
	$(PY) -m benchmarks.save_load $(ARGS)

bench-jax: $(STAMP) ## Measure saving and restoring through Orbax
	$(PY) -m benchmarks.orbax $(ARGS)

notebooks: $(STAMP) ## Run every notebook and keep its output
	$(PY) scripts/run_notebooks.py notebooks/*.ipynb $(ARGS)

docs: $(STAMP) ## Build the documentation into build/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

faults: $(STAMP) ## Run the fault table and write docs/faults.md
	$(PY) -m scripts.fault_table $(ARGS)

soak: $(STAMP) ## Run the long tests
	$(PY) -m pytest -m soak $(ARGS)

wheel: $(STAMP) ## Build the wheel into dist/
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation -c constraints.txt -w dist .

clean: ## Remove the virtual environment, caches and builds
	rm -rf $(VENV) build dist .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt scripts/setup_venv.sh
	@sh scripts/setup_venv.sh $(VENV) $(PYTHON)
	@touch $@
