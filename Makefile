# `make help` lists what there is. Every target installs what it needs first;
# a stamp file makes the second call go straight to work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test soak check fix bench build clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "shoal needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small transformer on 2 local ranks, then resume it
	$(BIN)/shoal train --name demo --overwrite
	$(BIN)/shoal train --resume runs/demo --steps +20

test: $(STAMP) ## run all tests
	$(BIN)/python -m pytest

soak: $(STAMP) ## run the long tests: random programs, kills, damages, world sizes
	$(BIN)/python -m pytest -m soak

check: $(STAMP) ## lint and type-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --level error

fix: $(STAMP) ## format, and mend what the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## benchmarks against plain, DDP, FSDP1 and FSDP2 on the device that is there
	$(BIN)/shoal bench

build: $(STAMP) ## make the wheel and the source archive in dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove the environment and everything generated
	rm -rf $(VENV) dist build runs .pytest_cache .ruff_cache .hypothesis
