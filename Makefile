# Two commands a newcomer needs: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint format clean

setup: $(STAMP)

# The constraints name versions that are known to resolve together on a machine without a GPU.
$(STAMP): pyproject.toml deploy/constraints/cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Foray needs Python >= 3.11, this is %d.%d: set PYTHON=python3.11" % v[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "no venv module: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet -c deploy/constraints/cpu.txt -e ".[cpu,dev]"
	@touch $@

demo: setup
	$(BIN)/foray demo $(ARGS)

test: setup lint
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
