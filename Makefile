# A fresh clone needs only Python 3.11 or newer and make. Each target makes .venv the first time and keeps it.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
NEWEST := .venv-triton-newest
NEWEST_TRITON := 3.9.0
NEWEST_STAMP := $(NEWEST)/triton-$(NEWEST_TRITON).dist-info
NEWEST_TORCH := .venv-torch-newest
NEWEST_TORCH_VERSION := 2.14.1
NEWEST_TORCH_STAMP := $(NEWEST_TORCH)/.installed-$(NEWEST_TORCH_VERSION)
# Each process that a test starts imports PyTorch: 2 s from bytecode, 6 s without.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help prove collect test test-gpu honest newest-triton test-newest-triton builds-newest-triton newest-torch \
  test-newest-torch builds digests lint format types imports structure docs check-docs table check-table check-records \
  archive wheel ci clean

help: ## this list
	@echo 'make TARGET [ARGS="..."] [PYTHON=/path/to/python3]'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

# What is installed beside the environment waits for its pip alone.
PIP := $(BIN)/pip
$(PIP):
	@python=$$(PYTHON='$(PYTHON)' tools/find-python) && "$$python" tools/venv.py $(VENV) --only-pip

$(STAMP): pyproject.toml tools/venv.py | $(PIP)
	@python=$$(PYTHON='$(PYTHON)' tools/find-python) && "$$python" tools/venv.py $(VENV)

prove: $(STAMP) ## prove the kernels: on the GPU here, or what can be proved without one (ARGS: see flashmoe prove --help)
	@$(BIN)/flashmoe prove $(ARGS) && $(BIN)/flashmoe claims

collect: $(STAMP) ## import every test; in a fresh clone each later process is spared 5 s of writing bytecode
	@found=$$($(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider) || { echo "$$found"; exit 1; }

test: $(STAMP) ## the tests of a few minutes (ARGS="-m slow": the slow ones; ARGS="-k name": some)
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-gpu: $(STAMP) ## the tests that need an NVIDIA GPU
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu: torch sees no CUDA device here")'
	@$(BIN)/python -m pytest -m gpu $(ARGS)

honest: $(STAMP) ## how many of 10,000 whole runs condemn an honest kernel, at most 3: half an hour on two cores (ARGS="200": of so many)
	@$(BIN)/python -m tests.harness.honest $(or $(ARGS),10000)

$(NEWEST_STAMP): | $(PIP)
	@rm -rf $(NEWEST) && echo "setup: installing Triton $(NEWEST_TRITON) into $(NEWEST)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(NEWEST) triton==$(NEWEST_TRITON)

newest-triton: $(NEWEST_STAMP) ## install the newest supported Triton beside the environment

test-newest-triton: $(STAMP) newest-triton ## compile every kernel with the newest supported Triton
	@PYTHONPATH=$(NEWEST) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(NEWEST_TRITON)", triton.__version__'
	@PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist worksteal tests/compile $(ARGS)

builds-newest-triton: $(STAMP) newest-triton ## those of test-newest-triton that `make ci` makes, in one process
	@$(MAKE) --no-print-directory test-newest-triton ARGS='-n 0 -m "not redundant and not one_triton"'

$(NEWEST_TORCH_STAMP): | $(PIP)
	@rm -rf $(NEWEST_TORCH) && echo "setup: installing torch $(NEWEST_TORCH_VERSION) into $(NEWEST_TORCH) (a minute or two)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --no-warn-conflicts --target $(NEWEST_TORCH) \
	  torch==$(NEWEST_TORCH_VERSION) triton==3.8.0
	@touch $@

newest-torch: $(NEWEST_TORCH_STAMP) ## install the newest supported PyTorch, and its Triton, beside the environment

test-newest-torch: $(STAMP) newest-torch ## the tests with the newest supported PyTorch (ARGS=tests/unit: without compiling kernels)
	@PYTHONPATH=$(CURDIR)/$(NEWEST_TORCH) $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

builds: $(STAMP) ## build every config of every kernel for sm_80, 86, 89, 90, 100 and 120: 30 minutes on two cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal tests/compile/test_kernels.py $(ARGS)

digests: $(STAMP) newest-triton ## compare all machine code with its digests, both Tritons: 25 minutes on two cores (ARGS=--write-digests: write)
	@$(BIN)/python -m pytest -n 2 --dist worksteal tests/compile $(ARGS)
	@PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest -n 2 --dist worksteal tests/compile $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check --quiet . || { echo 'run: make format'; exit 1; }

format: $(STAMP) ## rewrite the code as lint wants it
	@$(BIN)/python -m ruff check --fix --quiet . ; $(BIN)/python -m ruff format .

types: $(STAMP) ## mypy, strict
	@$(BIN)/python -m mypy

imports: $(STAMP) ## the import contracts
	@$(BIN)/python -c 'from importlinter.cli import lint_imports_command; lint_imports_command()' --no-cache --no-logo

structure: $(STAMP) ## print rooms, arrows, floors, long files, lines of code; fail above a limit (ARGS="--against REVISION": the change too)
	@$(BIN)/python tools/structure.py $(ARGS)

docs: $(STAMP) ## write the generated pages and the README's numbers
	@$(BIN)/python docs/generate.py

check-docs: $(STAMP) ## fail if a generated page or number is stale
	@$(BIN)/python docs/generate.py --check

table: $(STAMP) ## write the dispatch table that the committed records support
	@$(BIN)/python tools/dispatch_table.py

check-table: $(STAMP) ## fail if the dispatch table is not what the records support
	@$(BIN)/python tools/dispatch_table.py --check && echo 'table: the dispatch table is what the records support'

archive: $(STAMP) ## gzip the runs that no verdict, claim or entry of the table rests on into evidence/archive
	@$(BIN)/python tools/archive_runs.py

check-records: $(STAMP) ## check-docs, check-table, and fail if a committed record is a proven regression from what is kept
	@$(BIN)/python tools/check_records.py

wheel: $(STAMP) ## build the wheel and look inside
	@rm -rf dist build && $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@$(BIN)/python tools/check_wheel.py dist

ci: ## what continuous integration runs
	@.ci/run

clean: ## remove the environments and everything generated that git ignores, except reports
	@rm -rf $(VENV) $(NEWEST) $(NEWEST_TORCH) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find src tests docs tools -name __pycache__ -type d -prune -exec rm -rf {} + ; rm -rf src/*.egg-info
