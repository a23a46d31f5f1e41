# One front door. Needs only Python 3.11+ and make; `make setup` brings everything else into .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.complete
SDK := tests/sdk/requirements
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo check test docs format clean bench-core bench-supervisor bench-checkpoint bench-checkpoint-faults \
	bench-server bench-lending bench-packing

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 26

setup: $(STAMP)  ## make .venv with exact versions

$(STAMP): pyproject.toml constraints.txt $(SDK).txt $(SDK)-old.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Sublet needs Python 3.11 or newer; this is %s. Set PYTHON=..." % sys.version.split()[0])'
	@rm -f $(STAMP)
	@test -x $(BIN)/python || { rm -rf .venv; $(PYTHON) -m venv .venv; }
	@echo "Installing into .venv (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@test -x .venv/pai/bin/python || $(PYTHON) -m venv .venv/pai
	@.venv/pai/bin/python -m pip install --quiet --disable-pip-version-check -r $(SDK).txt
	@rm -rf .venv/pai-old
	@.venv/pai/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv/pai-old -r $(SDK)-old.txt
	@touch $(STAMP)

demo: setup  ## lend, reclaim, resume: the whole idea on real training, in a minute or two
	@$(BIN)/sublet demo

check: setup  ## lint, types, layers, house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/tidy

test: setup  ## all tests
	$(BIN)/pytest -q -n $(WORKERS) --dist worksteal tests

docs: setup  ## rewrite the reference pages that follow from the code
	@$(BIN)/python docs/make_reference.py

format: setup  ## let ruff rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-core bench-supervisor bench-checkpoint bench-server bench-lending bench-packing: setup  ## tables of measurements
	$(BIN)/python benchmarks/$(subst bench-,,$@).py

bench-checkpoint-faults: setup  ## what survives which fault
	$(BIN)/python benchmarks/checkpoint_faults.py

clean:  ## remove what make made
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
