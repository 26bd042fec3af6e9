# `make help` lists what there is. Every target installs what it needs first;
# a stamp file makes the second call go straight to work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_VENV := .venv-docs

.PHONY: help demo test test-pure test-ranks test-integrations soak check fix bench docs build clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "shoal needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP) ## train a small transformer on 2 local ranks, then resume it
	$(BIN)/shoal train --name demo --overwrite
	$(BIN)/shoal train --resume runs/demo --steps +20

# Tests of one process leave cores idle that ranks can use, so both kinds run at once. The ranks'
# progress is shown as it is made; the other half, which ends first, shows its own when it ends.
test: export OMP_NUM_THREADS := 1
test: $(STAMP) ## run all tests
	@$(MAKE) --no-print-directory --jobs=2 --keep-going test-pure test-ranks

test-pure:
	@log=$$(mktemp) && { $(BIN)/python -m pytest tests/pure > $$log 2>&1; status=$$?; \
	  echo; cat $$log; rm $$log; exit $$status; }

test-ranks:
	@$(BIN)/python -m pytest $(filter-out tests/pure/,$(wildcard tests/*/))

# The frameworks have an environment of their own, so that none of them decides which torch is tested.
# torchtitan comes without its dependencies, of which the others do: it asks for an older `datasets` than Transformers' friends.
.venv-integrations/.installed: pyproject.toml constraints.txt
	@test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --editable '.[dev,hf,lightning,ray,tensorboard]' einops pillow torchdata torch_checkpointing tyro triton
	.venv-integrations/bin/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 spmd_types==0.2.3
	@touch $@

test-integrations: export OMP_NUM_THREADS := 1
test-integrations: .venv-integrations/.installed ## install the frameworks, run shoal inside of each
	.venv-integrations/bin/python -m pytest tests/integrations -m ""

soak: $(STAMP) ## run the long tests: random programs, kills, damages, all combinations
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

# The site needs no torch: docstrings are read, not imported.
$(DOCS_VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --requirement $(DOCS_VENV)/requirements.txt
	@touch $@

docs: $(DOCS_VENV)/.installed ## build the documentation in site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --clean

build: $(STAMP) ## make the wheel and the source archive in dist/
	$(BIN)/python -m build --no-isolation

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(DOCS_VENV) .venv-integrations site dist build runs .pytest_cache .ruff_cache .hypothesis
