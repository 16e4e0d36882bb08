# `make demo` and `make test` need nothing but Python 3.11 (3.12, 3.13) and make: they create .venv and fill it once.
#
#   make demo PYTHON=python3.12     another interpreter
#   make demo TORCH=torch           another torch than the CPU build, for example the CUDA build of your package index

PYTHON ?= python3.11
TORCH ?=
EXTRAS ?= dev,hf,gpu,web

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
STAMP := $(VENV)/.installed
CPU_TORCH := 2.13.0
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu

# Spinning OpenMP threads of several processes on few cores cost up to five times the run time.
export OMP_WAIT_POLICY := PASSIVE

FAST := not process and not slow

.DEFAULT_GOAL := help
.PHONY: help setup check format test demo chaos soak-sim bench-main bench-churn bench-codec bench-convergence bench-planner bench-emulated clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## the virtual environment .venv with everything in it (the other targets do it by themselves)

# torch comes first: a CPU build is ten times smaller than what an index offers by default. Then all the rest in one resolve:
# hivemind and libp2p installed one after the other leave protobuf and grpcio-tools at odds.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) not found; install it or say make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(TORCH),)
	$(PIP) install -qq "torch==$(CPU_TORCH)+cpu" 2> /dev/null \
	    || $(PIP) install -qq "torch==$(CPU_TORCH)" --extra-index-url $(CPU_TORCH_INDEX)
else
	$(PIP) install -qq $(TORCH)
endif
	$(PIP) install -qq --editable ".[$(EXTRAS)]"
	$(PIP) check
	touch $@

check: $(STAMP) ## format, lint, types, import rules, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist worksteal -m "$(FAST)" tests

format: $(STAMP) ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Each worker has one half of the tests and takes from the other's when done: what neighbours share is made once, not twice.
# Tests of real processes mostly wait, so two files of them run side by side; those that measure times have the machine alone.
test: $(STAMP) ## every test (under 20 minutes on 2 cores)
	$(BIN)/pytest -n 2 --dist worksteal -m "not process" tests
	$(BIN)/pytest -n 2 --dist loadfile -m "process and not alone" tests/process
	$(BIN)/pytest -m alone tests/process

demo: $(STAMP) ## one bootstrap, three peers and an owner train a small GPT-2 on this machine
	$(BIN)/python -m contrib.demo.demo

chaos: $(STAMP) ## real peers killed, frozen, cut off, drained: the same bits as undisturbed (root; 40 minutes; FLAGS='--short --codec none')
	$(BIN)/python -m contrib.chaos $(FLAGS)

soak-sim: $(STAMP) ## the swarm's own code on a simulated network: 20,000 small and 200 large scenarios, a crowd of 1,000 (hours)
	$(BIN)/python -m contrib.benchmarks.soak_sim $(FLAGS)

bench-main: $(STAMP) ## parity, efficiency, transport, hostile input, exits: the table of README.md (ONLY=section for one)
	$(BIN)/python -m contrib.benchmarks.main_job $(if $(ONLY),--only $(ONLY))

bench-emulated: $(STAMP) ## plans on an emulated network of slow peers: promised against measured, time to a loss, overlap (root; 26 minutes)
	$(BIN)/python -m contrib.benchmarks.emulated $(if $(ONLY),--only $(ONLY))

bench-churn: $(STAMP) ## recovery, joining, settling, copies, 24 idle peers: what it costs when peers come and go (ONLY=section for one)
	$(BIN)/python -m contrib.benchmarks.churn $(if $(ONLY),--only $(ONLY))

bench-codec: $(STAMP) ## codecs: speed, bits per kept element, up to which link each pays
	$(BIN)/python -m contrib.benchmarks.codec

bench-convergence: $(STAMP) ## losses through codecs and cut layers after equal steps, time to a loss (an hour; ONLY=case)
	$(BIN)/python -m contrib.benchmarks.convergence $(if $(ONLY),--only $(ONLY))

bench-planner: $(STAMP) ## every scheduler on six testbeds, optima, DT-FM, the clock: simulated (ONLY=section for one)
	$(BIN)/python -m contrib.benchmarks.planner $(if $(ONLY),--only $(ONLY))

clean: ## remove the environment and everything that a target wrote
	rm -rf $(VENV) .demo bench-results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
