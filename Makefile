# make demo, make test: a fresh machine needs Python 3.11 or newer, g++ and a package index.
PYTHON ?= python3
# The CPU build: tests and demo need no GPU. To use one: make demo TORCH=torch==2.11.0 TORCH_INDEX=
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test nightly fuzz lint bench clean

help:
	@echo "make demo     draw pictures with the model inside, before and after (demo.png, demo_compare.png)"
	@echo "make test     lint, then every test (those that need a GPU skip themselves without one)"
	@echo "make nightly  what takes too long for every change: whole tables of gradients, torch's operator"
	@echo "              samples as far as they have not run with these sources (2 hours), then make fuzz"
	@echo "make fuzz     10,000 random programs, other ones each time (FUZZ_EXAMPLES=n)"
	@echo "make lint     ruff check, ruff format --check, mypy --strict"
	@echo "make bench    what the benchmarks measure, and how to run them"
	@echo "make clean    remove what the others made, .venv included"

demo: $(READY)
	$(BIN)/python examples/demo.py

# Two processes of one thread, as one of two uses little more than one core: two of two get in each
# other's way. The second's report comes after the first's.
HALF := tests/artefacts tests/debug tests/fusion tests/fuzz tests/cli tests/serve tests/train tests/e2e tests/bench tests/badinput tests/kernels tests/meta tests/ops tests/reductions tests/views tests/lookups tests/patterns
OTHERS = $(filter-out $(HALF) %.py %__pycache__ tests/golden,$(wildcard tests/*))
CHOICE := -p no:cacheprovider -m "not nightly" --durations=30
test: export OMP_NUM_THREADS ?= 1
test: lint
	@mkdir -p build; \
	$(BIN)/python -m pytest $(CHOICE) $(HALF) > build/half.txt 2>&1 & half=$$!; \
	trap "kill $$half 2>/dev/null" INT TERM; status=0; \
	$(BIN)/python -m pytest $(CHOICE) $(OTHERS) || status=1; \
	wait $$half || status=1; cat build/half.txt; exit $$status

nightly: export OMP_NUM_THREADS ?= 1
nightly: $(READY)
	@status=0; \
	$(BIN)/python -m tests.operators.sweep || status=1; \
	$(BIN)/python -m pytest -m nightly tests || status=1; exit $$status
	$(MAKE) fuzz

fuzz: export FUZZ_EXAMPLES ?= 10000
fuzz: $(READY)
	$(BIN)/python -m pytest tests/fuzz --show-capture=no

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/strop bench --help

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	rm -f demo.png demo_compare.png
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that no other requirement picks another build of it. A "+cpu"
# version wins over the plain one; where its index cannot be reached, pip says so and goes on.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Strop needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@
