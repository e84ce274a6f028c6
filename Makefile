# `make demo` and `make test` set up .venv on first use and need nothing else installed but
# Python 3.11 or later and, for the fast CPU kernels, a C++ compiler.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test sanitize lint wheel bench clean

demo: $(READY)
	$(BIN)/torch-hybrid demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		--durations 20 --durations-min 5

# The contract suites of the C++ ops and an engine's run, every access of a kernel checked.
sanitize: $(READY)
	$(BIN)/python -m tests.hostile.sanitize

# Type checkers cannot follow the ops/ and graphs/ mapping of an editable install: check a copy.
lint: $(READY)
	$(BIN)/pip install --quiet -c constraints.txt ruff mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/typed .
	MYPYPATH=build/typed $(BIN)/mypy -p torch_hybrid

# The pure wheel, and one with built kernels, which is tried without a compiler: minutes, and g++.
wheel: $(READY)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -m torch_hybrid.ops.native.wheel dist/*-none-any.whl dist
	$(BIN)/python -m tests.installed_wheel dist/*-manylinux*.whl

bench: $(READY)
	$(BIN)/python -m benchmarks.run_all

clean:
	rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt setuptools wheel
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[test]"
	touch $@
