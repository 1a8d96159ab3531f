# Two commands a newcomer needs: `make demo` and `make test`. Both set everything up first.
# Processes by the hundred start in tests; without compiled files each would compile what it imports again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang asks for versions that a learner does not want, so it has an environment of its own.
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_VERSION := 0.5.21
# Other people's clients, in an environment apart: their dependencies are not ours.
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
# uv and cyclonedx-py, for `make lock` alone.
LOCK_VENV := .venv-lock
LOCK_STAMP := $(LOCK_VENV)/.installed

.PHONY: setup demo test test-slow test-all sglang-env test-sglang test-peers mutants reliability figures page reference docs lint format lock sbom clean chaos simulate fuzz

setup: $(STAMP)

# The constraints name versions that are known to resolve together on a machine without a GPU.
$(STAMP): pyproject.toml requirements/cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Foray needs Python >= 3.11, this is %d.%d: set PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet -c requirements/cpu.txt -e ".[cpu,dev]"
	@touch $@

demo: setup
	$(BIN)/foray demo $(ARGS)

# The fast tier, minutes on two cores, and lint beside it.
WORKERS ?= 2
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The fast tests wait about half of their time: four workers keep two cores busy.
test: WORKERS := 4
test: setup
	@( $(LINT) ) > $(VENV)/lint.log 2>&1 & \
	$(PYTEST) -m "not slow" $(ARGS); tests=$$?; wait $$!; lint=$$?; cat $(VENV)/lint.log; exit $$((tests | lint))

# What the fast tier leaves out: whole runs of many processes, several ranks, warm starts, benchmarks.
test-slow: setup
	$(PYTEST) -m slow $(ARGS)

# Every test that needs no further environment.
test-all: setup lint
	$(PYTEST) $(ARGS)

# Real SGLang on a machine without a GPU: 3 GB, once. torch comes from the index that pip is set up with; the CPU's
# torch is the smaller one.
sglang-env: $(SGLANG_STAMP)

$(SGLANG_STAMP): requirements/sglang_cpu.txt
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(SGLANG_VENV)/bin/python -m pip install --quiet -r requirements/sglang_cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG_VERSION)
	@touch $@

# The engine contract over the fake, the embedded engine and real SGLang. FORAY_SGLANG_PYTHON names another
# interpreter that has SGLang; FORAY_SGLANG_URL and FORAY_SGLANG_MODEL an SGLang that runs already.
test-sglang: setup $(if $(FORAY_SGLANG_PYTHON)$(FORAY_SGLANG_URL),,sglang-env)
	FORAY_SGLANG_PYTHON="$${FORAY_SGLANG_PYTHON:-$(CURDIR)/$(SGLANG_VENV)/bin/python}" $(BIN)/python -m pytest tests/contracts/engine $(ARGS)

$(PEERS_STAMP): requirements/peers.txt
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps -r requirements/peers.txt
	@touch $@

# Published clients and servers of others against ours, and models of clients without a wheel, in
# tests/contracts/test_client_models.py, which the fast tier runs too. Prints each client and what it did.
PEERS := tests/peers tests/contracts/test_client_models.py
test-peers: setup $(PEERS_STAMP)
	FORAY_PEERS_PYTHON="$(CURDIR)/$(PEERS_VENV)/bin/python" $(BIN)/python -m pytest $(PEERS) $(ARGS)

# Known faults, built into a copy of the checkout one by one: the fast tier must notice each. ARGS="word" chooses some.
mutants: setup
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Every test of the fault table; writes its results into docs/reliability.md.
reliability: setup
	$(BIN)/python tests/faults/report.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The figures that are missing or whose code has changed, one by one, a quarter of an hour each at most, and the page
# docs/benchmarks.md from them. ARGS="engine demo-0" makes these, ARGS=--force all of them.
figures: setup
	$(BIN)/python -m benchmarks.figures $(ARGS)

# The page alone, which marks as stale what was measured on other code.
page: setup
	$(BIN)/python -m benchmarks.figures --page

# The pages that are made from code: settings, metrics, presets. The tests fail while one of them is stale.
reference: setup
	for page in configuration metrics:observability presets; do \
	  $(BIN)/python -m deploy.reference.$${page%:*} > $(VENV)/page.md && cp $(VENV)/page.md docs/$${page#*:}.md || exit 1; done

# The pages as a site in site/, with every link checked. ARGS=--serve shows them at http://127.0.0.1:8000 while you write.
docs: setup
	@$(BIN)/python -c 'import mkdocs, material' 2>/dev/null || $(BIN)/python -m pip install --quiet -c requirements/cpu.txt -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter --serve,$(ARGS)),serve,build --strict)

# Real processes under faults, at random, for MINUTES. CONTROL=1: without the delivery rules, which the judge must see.
# MAXMEMORY_MB=8: with a Redis that is full again and again.
MINUTES ?= 10
SEED ?= 1
PERSISTENCE ?= aof
CHAOS := $(BIN)/python tests/chaos/driver.py --seed $(SEED) --persistence $(PERSISTENCE)

chaos: setup
	$(CHAOS) $(if $(CONTROL),--control) $(if $(MAXMEMORY_MB),--maxmemory-mb $(MAXMEMORY_MB)) --minutes $(MINUTES) $(ARGS)

# The product whole in virtual time, schedule after schedule for SECONDS; a seed that fails is played again, aloud.
SECONDS ?= 60
simulate: setup
	$(BIN)/python tests/simulation/run.py --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# Malformed input for every decoder and every HTTP route: a table, and an exit code of 1 where anything was found.
# ARGS=--json prints one JSON object; ARGS="--only codec.decode" takes one decoder.
INPUTS ?= 1000000
REQUESTS ?= 20000
fuzz: setup
	@$(BIN)/python -c 'import atheris, schemathesis' 2>/dev/null || $(BIN)/python -m pip install --quiet -c requirements/cpu.txt -e ".[fuzz]"
	$(BIN)/python tests/fuzz/fuzz_run.py --inputs $(INPUTS) --requests $(REQUESTS) --seed $(or $(SEED),0) $(ARGS)

lint: setup
	$(LINT)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Every package by hash (requirements/cpu.lock), and the bill of materials made from it. UV_ARGS="--extra-index-url ..."
# for an index of one's own; torch+cpu comes from the index of CPU builds that PyTorch names.
lock: $(LOCK_STAMP)
	$(LOCK_VENV)/bin/uv pip compile --quiet pyproject.toml --extra cpu --extra dev -c requirements/cpu.txt \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" $(UV_ARGS) -o requirements/cpu.lock
	$(MAKE) sbom

sbom: $(LOCK_STAMP)
	$(LOCK_VENV)/bin/cyclonedx-py requirements requirements/cpu.lock --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --spec-version 1.6 -o requirements/foray.cdx.json

$(LOCK_STAMP): requirements/lock-tools.txt
	@test -x $(LOCK_VENV)/bin/python || $(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet -r requirements/lock-tools.txt
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(PEERS_VENV) $(LOCK_VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis site
