# `make demo` and `make test` do all their set-up in .venv. PYTHON=python3.12 chooses the interpreter that it is made with.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable
# What the data plane's extensions are made from.
COMPILED := setup.py $(wildcard shmsched/dataplane/*.py shmsched/dataplane/*.pxd)
# What runs in every process of a step's way, and is tested interpreted as well.
INTERPRETED := tests/dataplane tests/scheduling tests/client tests/memory tests/faults/test_interrupts_in_the_middle.py tests/processes/test_client.py

.PHONY: demo test build clean

demo: $(VENV)/.demo
	$(BIN)/shmsched demo

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile -m 'not soak and not alone'
	$(BIN)/python -m pytest -m 'alone and not soak'
	SHMSCHED_INTERPRETED=1 $(BIN)/python -m pytest $(INTERPRETED)

# The extensions alone, whatever they are like now. A machine without a C compiler does without them.
build: | $(BIN)/python
	$(INSTALL) .
	$(BIN)/shmsched --version

# Both install the checkout itself, so that neither ever runs an older copy of it than the other.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: pyproject.toml $(COMPILED) | $(BIN)/python
	$(INSTALL) '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) build shmsched.egg-info shmsched/dataplane/_compiled .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
