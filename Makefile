# The two commands to start with are `make pretrain` and `make test`; both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Three tests at a time on two cores, each on the next free worker: many start processes and wait for them.
PYTEST_ARGUMENTS ?= -n 3 --dist worksteal
GPU_OUTPUT ?= runs/gpu

.PHONY: help setup pretrain test test-all test-kernels gpu lint docs clean

help:
	@echo 'make pretrain   pretrain a small GPT-2 and a small BERT on the shipped corpus, on 2 local replicas'
	@echo 'make test       run the tests that are quick (PYTEST_ARGUMENTS=... for others)'
	@echo 'make test-all   run all tests, and those of the GPU kernels without a GPU in an interpreter (installs 1 GB)'
	@echo 'make test-kernels  run those of the GPU kernels alone'
	@echo 'make gpu        on a machine with a GPU: prove and measure in ten minutes, into GPU_OUTPUT (runs/gpu)'
	@echo 'make setup      only set up the environment in $(VENV)'
	@echo 'make lint       check style and types'
	@echo 'make docs       build the documentation site into build/site, with API pages from the docstrings'
	@echo 'make clean      remove runs, checkpoints and prepared data'

# Tests start hundreds of processes: none compiles the package again, even where Python is told to keep no bytecode.
test test-all test-kernels: export PYTHONDONTWRITEBYTECODE :=

setup: $(VENV)/.ready

pretrain: $(VENV)/.ready
	@PATH="$(abspath $(BIN)):$$PATH" launch/quickstart.sh

test: $(VENV)/.ready-for-tests
	$(BIN)/python -m pytest -m 'not slow and not triton' --durations=10 $(PYTEST_ARGUMENTS)

test-all: $(VENV)/.ready-for-kernels
	$(BIN)/python -m pytest --hypothesis-profile=ci --durations=20 $(PYTEST_ARGUMENTS)

test-kernels: $(VENV)/.ready-for-kernels
	$(BIN)/python -m pytest -m triton $(PYTEST_ARGUMENTS)

gpu: $(VENV)/.ready-for-kernels
	$(BIN)/python -m benchmarks.gpu --output $(GPU_OUTPUT)

lint: $(VENV)/.ready-for-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin

docs: $(VENV)/.ready-for-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf runs checkpoints data/prepared

$(VENV)/.ready: pyproject.toml launch/setup.sh
	launch/setup.sh "$(PYTHON)" "$(VENV)" logging
	@touch $@

$(VENV)/.ready-for-tests: $(VENV)/.ready
	launch/setup.sh "$(PYTHON)" "$(VENV)" test
	@touch $@

$(VENV)/.ready-for-kernels: $(VENV)/.ready-for-tests
	launch/setup.sh "$(PYTHON)" "$(VENV)" test,kernels
	@touch $@

$(VENV)/.ready-for-docs: $(VENV)/.ready
	launch/setup.sh "$(PYTHON)" "$(VENV)" docs
	@touch $@
