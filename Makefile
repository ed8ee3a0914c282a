# Every target works alone on a fresh clone: it makes .venv and builds what it needs first.
#   make demo | test | lint | bench | docs | native-test | sanitize | format | clean | build
# PYTHON chooses the interpreter of the virtual environment, ARGS is passed on, e.g.
#   make test ARGS="tests/plan -x"        make demo ARGS="--data DIR --cache 10%"

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMPS := $(VENV)/.stamps

# What the compiled module is made of; touching one of these rebuilds it.
NATIVE := $(shell find native/include native/src bindings shim -type f 2>/dev/null)
CPP    := $(shell find native bindings shim -name '*.cpp' -o -name '*.h' -o -name '*.c' 2>/dev/null)

.PHONY: build demo test lint format bench docs native-test sanitize clean
export PATH := $(CURDIR)/$(BIN):$(PATH)

build: $(STAMPS)/installed

demo: $(STAMPS)/installed
	stoker demo $(ARGS)

test: $(STAMPS)/installed
	python -m pytest $(ARGS)

lint: $(STAMPS)/installed
	ruff check .
	ruff format --check .
	mypy --strict src
	$(if $(CPP),clang-format --dry-run -Werror $(CPP))

format: $(STAMPS)/installed
	ruff check --fix --quiet . || true
	ruff format .
	$(if $(CPP),clang-format -i $(CPP))

bench: $(STAMPS)/installed
	python benchmarks/run_all.py $(ARGS)

docs: $(STAMPS)/installed
	python docs/render.py build/docs

native-test: $(STAMPS)/tools
	cmake -S . -B build/native -G Ninja -DSTOKER_PYTHON=OFF -DSTOKER_TESTS=ON -DCMAKE_BUILD_TYPE=Release
	cmake --build build/native
	ctest --test-dir build/native --output-on-failure $(ARGS)

# One build for memory errors and undefined behaviour, one for data races: they exclude each other.
sanitize: $(STAMPS)/tools
	for kind in address,undefined thread; do
	  folder=build/sanitize-$${kind%%,*}
	  cmake -S . -B $$folder -G Ninja -DSTOKER_PYTHON=OFF -DSTOKER_TESTS=ON \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTOKER_SANITIZE=$$kind
	  cmake --build $$folder
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    ctest --test-dir $$folder --output-on-failure $(ARGS)
	done

clean:
	rm -rf build dist demo-output bench-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f $(STAMPS)/installed

# ---- set-up, each step behind a stamp so that a second run costs nothing ----

$(STAMPS)/created:
	@command -v $(PYTHON) >/dev/null || { echo "Stoker needs Python 3.11 or newer; '$(PYTHON)' was not found. Name another: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Stoker needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version). Name another: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "No virtual environment could be made. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/tools: $(STAMPS)/created constraints.txt
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "Stoker's core is C++20 and no compiler was found. On Debian or Ubuntu: apt-get install g++ ; on Fedora: dnf install gcc-c++" >&2; exit 1; }
	echo "installing the build tools into $(VENV)"
	$(PIP) scikit-build-core nanobind cmake ninja
	touch $@

# torch goes first and alone, so that nothing else decides which build of it is installed.
$(STAMPS)/torch: $(STAMPS)/created constraints.txt
	@echo "installing torch into $(VENV) (the largest download; once)"
	$(PIP) torch==2.13.0
	touch $@

$(STAMPS)/installed: $(STAMPS)/tools $(STAMPS)/torch pyproject.toml CMakeLists.txt $(NATIVE)
	@echo "building the core and installing stoker into $(VENV)"
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@
