# Clearhead's commands. `make` alone lists them. Each sets up .venv first where that is needed.

PYTHON ?= python3
# More arguments for pip, for example an index with another build of PyTorch.
PIP_ARGS ?=

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all check format clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv with the pinned versions (the other commands do this by themselves)

# Only this file marks success: an interrupted installation is taken up again by the next make.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Clearhead needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { \
		echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/pip install --quiet $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a model on Python's own manual for two minutes, sample from it, measure it
	@rm -rf runs/demo
	$(BIN)/clearhead doctor
	$(BIN)/clearhead train manual --out runs/demo
	$(BIN)/clearhead generate runs/demo "The for statement is used to" --max-new-tokens 100 --seed 1
	$(BIN)/clearhead eval runs/demo
	@echo
	@echo "The model is in runs/demo/model, its curves are in runs/demo/curves.png. Now try:"
	@echo "  source .venv/bin/activate            then plain clearhead works"
	@echo "  clearhead train my.txt               a text of your own"
	@echo "  clearhead recipes                    what else can be trained"
	@echo "  clearhead diagnose runs/demo         what this run could do better"
	@echo "  clearhead walk                       one attention head with all its numbers"
	@echo "  clearhead show runs/demo             where its parameters are"

# Two workers with one thread each finish earlier than one worker with two: the tests are tiny. A file
# stays with its worker, so that what its tests share is made once.
test: $(READY) ## run the fast tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(READY) ## run all tests, the slow ones too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m ''

check: $(READY) ## lint, format and types, as CI does
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## put the code in the house format and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and everything that tools left behind
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
