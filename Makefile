# Every command makes or reuses .venv; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# the oldest transformers that the integration serves, beside the newest: for one test
OLDEST := $(VENV)/transformers-4.57
# an environment without constraints, as `pip install` makes it today
NEWEST := $(VENV)/newest
PIP_INSTALL_FLAGS ?=
GPU_WORKERS ?= 8
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help venv book pdf audit check test test-full test-newest compile compile-newest mutants lint chapters gpu-test bench
.DEFAULT_GOAL := help

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt constraints-triton.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_INSTALL_FLAGS) --no-deps -r constraints-triton.txt
	$(BIN)/python -m pip install --quiet $(PIP_INSTALL_FLAGS) -c constraints.txt -e '.[book,test,bench]'
	$(BIN)/python -m pip install --quiet $(PIP_INSTALL_FLAGS) --no-deps --upgrade --target $(OLDEST) \
		transformers==4.57.6 'huggingface-hub<1' 'tokenizers<0.23'
	touch $@

venv: $(STAMP) ## make .venv and install the pinned set (reused until pyproject or constraints change)

book: $(STAMP) ## run the chapters that changed, render the book to _build/html (ARGS=--all: run every one)
	$(BIN)/python tools/book.py $(ARGS)

pdf: $(STAMP) ## print the pages of make book to _build/linattn_edu.pdf, with Chromium or Chrome
	$(BIN)/python tools/pdf.py

check: $(STAMP) ## before every save: ruff, and one case of each test of the library (minutes)
	$(BIN)/python tools/check.py --quick

test: $(STAMP) ## the checks of every push
	$(BIN)/python tools/check.py

test-full: $(STAMP) ## the same with whole grids, every row compiled anew, and mutants (hours)
	$(BIN)/python tools/check.py --full

test-newest: ## the tests on what pip installs today without constraints, in .venv/newest
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet $(PIP_INSTALL_FLAGS) --upgrade \
		--upgrade-strategy eager -e '.[book,test,bench]'
	$(NEWEST)/bin/python -m pip list | grep -E '^(torch|triton|transformers|numpy) '
	LINATTN_EDU_SAMPLE=1 $(NEWEST)/bin/python tools/check.py pytest

compile: $(STAMP) ## compile the rows of kernels that changed, keep the results (ARGS=--all: all rows)
	$(BIN)/python tests/kernels/compile_rows.py --write $(ARGS)
	$(BIN)/python tests/kernels/compile_gluon.py --write $(ARGS)

compile-newest: $(STAMP) ## compile them with the newest Triton, in .venv/triton-newest: a sixtieth of the rows
	$(BIN)/python tools/newest.py

audit: $(STAMP) ## every page of the book with axe-core: light and dark, wide and narrow (after make book)
	LINATTN_EDU_FULL=1 $(BIN)/python -m pytest -q -n 2 tests/book/test_pages.py -k audit

mutants: $(STAMP) ## plant mistakes in a copy, one at a time: the tests must see each (ARGS="WORD...")
	$(BIN)/python tools/mutants.py $(ARGS)

lint: $(STAMP) ## ruff: lint and format, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

chapters: $(STAMP) ## sync each chapters/*.md to its .ipynb and execute what changed
	$(BIN)/python tools/chapters.py $(ARGS)

gpu-test: export LINATTN_EDU_RAN := tests/gpu/ran.json
gpu-test: $(STAMP) ## the kernels compiled: tests, every configuration row, the chapters (needs a CUDA GPU)
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "gpu-test needs a CUDA GPU")'
	$(BIN)/python -m pytest -q -n $(GPU_WORKERS) --dist worksteal tests --ignore tests/book --ignore tests/gpu
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python -m pytest -q -n $(GPU_WORKERS) --dist loadscope --nbval-lax chapters/*.ipynb

bench: $(STAMP) ## run the benchmarks (ARGS="CASE..."; needs a CUDA device)
	$(BIN)/python -m benchmarks $(ARGS)
