# make demo      the main job on this machine, set-up included
# make test      lint, types and tests, set-up included
# make docs      docs/ as a site, in build/docs; a link that leads nowhere fails
# make campaign  every trial of the long tests, of which make test runs a twentieth
# They need only Python 3.11+ and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

# A plain torch brings gigabytes of CUDA libraries: pin a version that has a CPU build.
ifeq ($(GPU),yes)
TORCH ?= torch>=2.11
EXTRAS := cupy,triton,cute,torch,dev
else
TORCH ?= torch==2.13.0
EXTRAS := triton,cute,dev
endif

# One process a core, each with one thread: NumPy's own threads would only compete with them.
# Tests that need a GPU run one after the other: they time kernels.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist worksteal

.PHONY: setup demo test campaign format readme docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)' --editable '.[$(EXTRAS)]'
	touch $@

demo: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m kernelcat.demo

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find kernels/cuda -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy
ifeq ($(GPU),yes)
	$(PYTEST_PARALLEL) -m 'not gpu'
	$(BIN)/pytest -m gpu
else
	$(PYTEST_PARALLEL)
endif

campaign: setup
	KERNELCAT_CAMPAIGN=1 $(PYTEST_PARALLEL) -m campaign

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find kernels/cuda -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

readme: setup
	$(BIN)/kernelcat leaderboard --readme README.md
	$(BIN)/python -m kernelcat.call.documentation > kernelcat/call/typed.pyi

docs: setup
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo build/docs/index.html

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
