# Needs Python 3.11 or later, g++, make and git; everything else comes from pip, into .venv.
#
#   TORCH_INDEX   an index with the CPU build of PyTorch (see the README); without it, whatever pip's own index has
#   PYTHON        the interpreter that .venv is made with

PYTHON ?= python3
TORCH_INDEX ?=
TORCH := torch==2.13.0
PIP_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check install --quiet $(PIP_FLAGS)
JOBS := $(shell nproc 2>/dev/null || echo 2)

CPP := $(shell find plugins/cpu -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name CMakeLists.txt 2>/dev/null)
CPP_FORMATTED := $(filter %.cpp %.h %.hpp,$(CPP))
CMAKE_TEST := $(BIN)/cmake -S plugins/cpu -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DEW_BUILD_TESTS=ON
BUNDLE := build/smollm2.bundle

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo test pytest lint types format test-cpp sanitize bench clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# PyTorch first: what depends on it must find the build that we chose, not pull another.
$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) "scikit-build-core>=1.1,<2" "nanobind>=2.4" "cmake>=3.27" "ninja>=1.11"
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(CPP)
	$(PIP) --no-build-isolation --editable ".[export,dev]"
	@touch $@

setup: $(VENV)/.installed  ## make .venv with everything that developing needs

demo: setup  ## fetch SmolLM2, export it, and ask it a question
	@set -e; model=$$($(PY) examples/fetch_smollm2.py); \
	$(BIN)/optimize export "$$model" --output $(BUNDLE) --recipe f32 --force; \
	echo; echo "What is the capital of France?"; \
	$(BIN)/optimize generate $(BUNDLE) "What is the capital of France?" --max-tokens 64 --temperature 0

test: lint types test-cpp pytest  ## check everything (lint, types, C++ and Python tests)

pytest: setup
	@$(PY) -m pytest -q -n 2 --dist worksteal

lint: setup  ## check style and the usual mistakes
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FORMATTED)

types: setup  ## check type hints
	$(BIN)/mypy

format: setup  ## rewrite sources in the house's format
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FORMATTED)

test-cpp: setup  ## build and run the C++ tests
	$(CMAKE_TEST) -B build/cpp -DCMAKE_BUILD_TYPE=Release >build/cpp.log || (cat build/cpp.log; false)
	$(BIN)/cmake --build build/cpp --parallel $(JOBS)
	$(BIN)/ctest --test-dir build/cpp --output-on-failure

sanitize: setup  ## run the C++ tests under ASan and UBSan, and the threaded ones under TSan

bench: setup  ## compare speed with llama.cpp on this machine (builds llama-cpp-python: ten minutes)
	$(PIP) --no-build-isolation --editable ".[bench]"
	$(PY) benchmarks/bench.py

clean:  ## remove builds and caches, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
