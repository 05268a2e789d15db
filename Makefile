# taskmesh. `make help` says what there is. Needs Python 3.11 or newer, make and pip; everything else comes into .venv.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first Python on this machine that is new enough: `make PYTHON=… install` takes another.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$python; break; fi; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
CODE := $(wildcard taskmesh tests benchmarks examples)

# Where it is set, every process of taskmesh would compile all modules again: half a second each.
unexport PYTHONDONTWRITEBYTECODE

# How many tests run at once, each group with a mongod of its own: most of them wait more than they compute.
JOBS ?= 4
QUICK := -m "not slow and not chaos and not failover and not browser and not node"
# Arguments that are handed on: `make test ARGS="-k fencing -x"`, `make demo ARGS=--help`
ARGS ?=

.PHONY: help install demo test test-web test-packaging test-node test-cli test-chaos screenshots test-all lint format bench bench-peers chaos soak docs docs-site clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## Create .venv with everything in it, in the versions of constraints.txt

# Again only when the packages that we ask for have changed.
$(INSTALLED): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then echo "taskmesh needs Python 3.11 or newer; found none on PATH" >&2; exit 1; fi
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip uninstall -qq --yes taskmesh # what this distribution was called before
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

demo: $(INSTALLED) ## Do a real job on an embedded MongoDB, kill a worker mid-run, check every result
	$(BIN)/taskmesh demo $(ARGS)

test: $(INSTALLED) ## Run the quick tests, on real mongods
	$(BIN)/python -m pytest -n $(JOBS) --maxschedchunk 1 --ignore tests/browser --ignore tests/node $(QUICK) $(ARGS)

test-web: $(INSTALLED) ## Click through the dashboard in a headless Chromium (apt-get install chromium)
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-node: $(INSTALLED) ## Build the Node client, and test it beside Python workers (apt-get install nodejs npm)
	$(BIN)/python -m pytest -m node tests/node $(ARGS)

test-cli: $(INSTALLED) ## Run the slow tests of the command line: signals, supervisor, probes, the demo
	$(BIN)/python -m pytest -n 2 -m slow tests/cli $(ARGS)

screenshots: $(INSTALLED) ## Take the screenshots of docs/web.md again, in Chromium
	TASKMESH_SCREENSHOTS=docs/web $(BIN)/python -m pytest tests/browser/test_every_page.py tests/browser/test_token.py $(ARGS)

test-all: $(INSTALLED) ## Run all tests but chaos, browser and node ones: also the slow ones, and failover on three mongods
	$(BIN)/python -m pytest -m "not chaos and not browser and not node" $(ARGS)

test-chaos: $(INSTALLED) ## Run the tests with faults: failover on three mongods, every verb with every fault, sabotage
	$(BIN)/python -m pytest -m "chaos or failover" $(ARGS)

test-packaging: $(INSTALLED) ## Install wheel and sdist into empty environments; check deploy/ and the image by the real programs
	$(BIN)/python -m pytest -n 2 tests/project/test_install.py tests/project/test_checkers.py tests/project/test_image.py $(ARGS)

lint: $(INSTALLED) ## Check style, format and types
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy $(CODE)

format: $(INSTALLED) ## Format the code, and mend what ruff can mend by itself
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

bench: $(INSTALLED) ## Measure the engine: each question prints one table
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(INSTALLED) ## Measure other task engines on the same machine, in environments of their own
	$(BIN)/python -m benchmarks.peers $(ARGS)

chaos: $(INSTALLED) ## Break a real fleet at random for CHAOS_SECONDS (1800) and check every promise; SEED=… repeats a run
	CHAOS_SECONDS=$(or $(CHAOS_SECONDS),1800) SEED=$(SEED) $(BIN)/python -m tests.chaos

soak: $(INSTALLED) ## Run a fleet under load and faults for SOAK_SECONDS (600): nothing grows, and the rate comes back
	SOAK_SECONDS=$(or $(SOAK_SECONDS),600) SEED=$(SEED) $(BIN)/python -m tests.chaos.soak

docs: $(INSTALLED) ## Check that links in the documents lead somewhere and that their examples run
	$(BIN)/python -m pytest tests/docs $(ARGS)

docs-site: $(INSTALLED) ## Build the documentation site into site/; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "site/index.html is ready"

clean: ## Remove .venv, caches and the data of the embedded MongoDB
	rm -rf $(VENV) .taskmesh .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
