# The same targets serve people and CI. VENV and PYTHON may be overridden: make test PYTHON=python3.12
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test check fmt bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP)  ## Make the virtual environment (exact versions from constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a minute or two the first time ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,dev]'
	@touch $@

demo: setup  ## Start E/PD, ask about pictures, clips and sounds, show answers and stage times, stop
	@$(BIN)/triptych demo

serve: setup  ## Start a server and leave it running (ARGS='MODEL --pattern E/P/D')
	@$(BIN)/triptych serve --enable-multimodal $(ARGS)

test: setup check  ## Lint, types and the whole default test suite
	@$(BIN)/python -m pytest $(ARGS)

check: setup  ## ruff and mypy, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fmt: setup  ## Let ruff mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## Run the benchmarks of docs/benchmarks.md (quiet machine; some ten minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
