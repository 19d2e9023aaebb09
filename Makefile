# Everything a contributor or the CI runs. `make` alone lists the targets.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# A choice of tests may leave one of the two runs empty, which pytest answers with 5.
MAY_BE_EMPTY := $(if $(PYTEST_ARGS),|| test $$? -eq 5)
STAMP := $(VENV)/.installed
# The one that goes with the torch of constraints.txt.
TORCHVISION := torchvision==0.28.0
C_SOURCES := setup.py $(wildcard src/outlive/_capture/*.[ch] src/outlive/graph/sampling/*.[ch])

# A program that tests use, from Debian where we may; where we may not, those tests are skipped and say why.
apt = command -v $(1) >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null \
	|| { apt-get update -qq; apt-get install -qq -y --no-install-recommends $(1); } >/dev/null 2>&1 \
	|| echo "setup: $(1) could not be installed; tests that need it are skipped"

export PIP_NO_INPUT := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup lint format test test-all stress torture notebooks browser machine portable wheel clients demo bench bench-peers clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */\1\t/' | expand -t 14

setup: $(STAMP)  ## make .venv with everything in it (again only when the requirements or the C code change)

$(STAMP): pyproject.toml constraints.txt $(C_SOURCES)
	@echo "setup: installing into $(VENV), this may take some minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq -e '.[torch,forensics,demo,dev]' -c constraints.txt
	@$(call apt,tmux)
	@touch $@

lint: setup  ## ruff check, ruff format --check, mypy
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy

format: setup  ## let ruff fix and format what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What each target runs. `full` repeats a promise, `alone` needs the machine to itself, `browser` a real browser.
PYTEST := $(BIN)/python -m pytest --ignore tests/clients
QUICK := not full and not browser
# One process more than cores, for many tests wait. Each begins with a third of the files, so that what a file sets up
# is seldom set up twice.
PARALLEL := -n 3 --dist worksteal

test: setup lint  ## lint, types, every promise once, the wheel (PYTEST_ARGS='-k name' to choose)
	$(PYTEST) $(PARALLEL) -m "$(QUICK) and not alone" $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	$(PYTEST) -m "$(QUICK) and alone" $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@$(MAKE) --no-print-directory wheel

test-all: test  ## and every start method and seed, notebooks, the portable layer, clients, browser, machine
	$(PYTEST) $(PARALLEL) -m "full and not browser and not alone" $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	$(PYTEST) -m "full and not browser and alone" $(PYTEST_ARGS) $(MAY_BE_EMPTY)
	@$(MAKE) --no-print-directory portable clients browser machine torture

stress: setup  ## the tests of `make test` beside two busy loops per core, then in a random order
	$(BIN)/python tests/stress.py $(PARALLEL) -m "$(QUICK)" --ignore tests/clients $(PYTEST_ARGS)

torture: setup  ## random jobs with random faults, compared with stock torch bit for bit (SECONDS=1800 SEED=1)
	$(BIN)/python tests/torture.py --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED))

notebooks: setup  ## the tests that need a notebook kernel (`make test-all` has them, too)
	$(BIN)/python -m pytest tests/notebooks $(PYTEST_ARGS)

browser: setup  ## the dashboard in Chromium; installs it where apt may, and playwright (OUTLIVE_PICTURES=docs/guide/pictures: new pictures)
	@$(call apt,chromium)
	@$(BIN)/python -c "import playwright" 2>/dev/null || $(BIN)/python -m pip install -qq 'playwright>=1.40' \
		|| echo "browser: playwright could not be installed"
	$(BIN)/python -m pytest -m browser tests/dashboard $(PYTEST_ARGS)

machine: setup  ## tests that change settings of the whole machine for some seconds (overcommit, swap); as root, on a machine of one's own
	OUTLIVE_MAY_CHANGE_MACHINE=1 $(BIN)/python -m pytest tests/doctor/test_whole_machine.py $(PYTEST_ARGS)

portable: setup  ## the same faults and batches on the portable system layer, as macOS and Windows have it
	OUTLIVE_SYSTEM=portable $(BIN)/python -m pytest -n 2 tests/packing tests/test_desk.py \
		tests/faults/test_any_system.py tests/share/test_reading.py \
		tests/share/test_processes.py::test_everything_that_was_shared_is_read_by_workers \
		tests/share/test_processes.py::test_a_name_goes_with_the_data_on_the_portable_layer \
		tests/graph/test_faults.py tests/graph/test_shared.py \
		tests/graph/test_loading.py::test_rows_of_features_are_those_of_the_nodes_and_edges \
		$(PYTEST_ARGS) $(MAY_BE_EMPTY)
	$(if $(PYTEST_ARGS),,OUTLIVE_SYSTEM=portable $(BIN)/python -m pytest -n 2 tests/pool/test_pool.py \
		-k "not fork and not 1-spawn and not 7-spawn and not as_many")

wheel: setup  ## build the wheel and run an epoch with it, away from src
	.ci/check-wheel $(BIN)/python

clients: setup $(VENV)/.clients  ## train with Lightning, Accelerate, Transformers, fastai, PyG, …; installs them
	$(BIN)/python -m pytest -n 2 tests/clients $(PYTEST_ARGS) $(MAY_BE_EMPTY)

$(VENV)/.clients: pyproject.toml constraints.txt
	@echo "clients: installing into $(VENV), this may take some minutes"
	@$(BIN)/python -m pip install -qq -e '.[torch,clients]' -c constraints.txt
	@$(BIN)/python -m pip install -qq --no-deps fastai timm
	@$(BIN)/python -m pip install -qq --no-deps --upgrade --target $(VENV)/vision $(TORCHVISION)
	@touch $@

demo: setup  ## run the demonstration
	$(BIN)/python demo/demo.py

bench: setup  ## measure throughput against stock PyTorch, recovery, what evidence and being watched cost, what sharing saves, sizes, graphs, the pool, a check
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/watching.py
	$(BIN)/python benchmarks/sharing.py
	$(BIN)/python benchmarks/autosize.py
	$(BIN)/python benchmarks/sampling.py
	$(BIN)/python benchmarks/graph.py
	$(BIN)/python benchmarks/graph_memory.py
	$(BIN)/python benchmarks/pool.py
	$(BIN)/python benchmarks/check.py

bench-peers: setup  ## the same for torchdata, Grain and SPDL; installs them, and matplotlib for the plots
	@$(BIN)/python -m pip install -qq -e '.[torch,bench]' -c constraints.txt
	$(BIN)/python benchmarks/throughput.py --peers

clean:  ## remove everything that was made here
	rm -rf $(VENV) build dist src/*.egg-info src/outlive/_capture/*.so \
		src/outlive/graph/sampling/*.so src/outlive/graph/sampling/*.pyd .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
