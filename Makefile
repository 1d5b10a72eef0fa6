# make run [PROMPT="..."]   build, fetch the default model, answer
# make test                 everything CI checks, with its own set-up
# make check                lint, types and the tests that take seconds
# make docs                 the figures of the docs again, from benchmarks/results/
# make site                 the docs as a website, in build/site
# make lock                 requirements/*.lock again, after a change of the requirements in pyproject.toml
# make soak | bench | wheel the long tests | the comparison with peers (bench-serving: as servers) | a wheel in dist/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= qwen2.5-coder-0.5b
PROMPT ?= What is the difference between a list and a tuple in Python? Answer in one sentence.
SOURCES := $(shell find tandem -name '*.c' -o -name '*.h')

.PHONY: run test test-computed test-emulated check soak bench bench-serving wheel core abi shaders docs site lock clean
.DELETE_ON_ERROR:

run: $(VENV)/installed core
	@$(BIN)/tandem run $(MODEL) "$(PROMPT)"

# Packages are those of requirements/*.lock, and have their hashes. LOCKED=no takes the newest that pyproject.toml allows
# instead, for a Python that is newer than the locks, and builds what has no wheel for it.
LOCKED ?= yes
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
PIP_LOCKED := $(PIP) install --require-hashes --only-binary=:all:
# A plain path entry (compat): with a finder, Python beside a clone named `tandem` takes the folder for the package.
PIP_SELF := $(PIP) install --no-build-isolation --config-settings editable_mode=compat --editable

ifeq ($(LOCKED),yes)
$(VENV)/installed: pyproject.toml requirements/build.lock requirements/run.lock
	$(PYTHON) -m venv $(VENV)
	$(PIP_LOCKED) -r requirements/build.lock -r requirements/run.lock
	$(PIP_SELF) . --no-deps
	@touch $@

$(VENV)/dev-installed: $(VENV)/installed requirements/dev.lock
	$(PIP_LOCKED) -r requirements/dev.lock
	@touch $@
else
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade setuptools cffi
	$(PIP_SELF) .
	@touch $@

$(VENV)/dev-installed: $(VENV)/installed
	$(PIP_SELF) '.[dev,docs,peers,clients,ray]'
	@touch $@
endif

# Keeps the versions that the files have, where it can; UPGRADE=--upgrade takes the newest. The index is UV_DEFAULT_INDEX.
LOCK := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header $(UPGRADE)
BUILD_REQUIRES := $(BIN)/python -c "import tomllib as t; print(*t.load(open('pyproject.toml', 'rb'))['build-system']['requires'], sep='\n')"
lock: $(VENV)/dev-installed
	$(BUILD_REQUIRES) | $(LOCK) --all-extras pyproject.toml - -o requirements/dev.lock
	$(BUILD_REQUIRES) | $(LOCK) - -c requirements/dev.lock -o requirements/build.lock
	$(LOCK) pyproject.toml -c requirements/dev.lock -o requirements/run.lock
	$(LOCK) requirements/lm-eval.in --no-deps -c requirements/dev.lock -o requirements/lm-eval.lock

core: tandem/native/libtandem.so
tandem/native/libtandem.so: $(SOURCES) setup.py $(VENV)/installed
	@$(BIN)/python -c "import setup; from pathlib import Path; setup.compile_core(Path('build/core'), Path('$@'))"

# Only after a change of kernels/abi.py: abi.h and abi.slang are kept in the repository.
abi: $(VENV)/installed
	@$(BIN)/python -m tandem.kernels.generate_abi

# Only after a change of a kernels/*.slang: the SPIR-V is kept in the repository.
shaders: $(VENV)/installed
	@$(BIN)/python -m tandem.devices.vulkan.compile_shaders

# None of these measures time: they run in two processes at once, the others after them.
COMPUTED := tests/models tests/convert tests/program tests/plan tests/ops tests/npu
EMULATED := tests/rdna3 tests/vulkan/test_amd.py tests/vulkan/test_shaders.py

test: $(VENV)/dev-installed core
	@$(MAKE) --no-print-directory --jobs=2 --output-sync test-computed test-emulated
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTED) $(EMULATED))

test-computed:
	$(BIN)/python -m pytest $(COMPUTED)

test-emulated:
	$(BIN)/python -m pytest $(EMULATED)

check: $(VENV)/dev-installed core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "fast and not soak"

soak: $(VENV)/dev-installed core
	$(BIN)/python -m pytest -m soak

# PEER: a Python with llama_cpp built for this CPU, instead of building one; BENCH: options, such as --quick.
PEER ?= .venv-peer/bin/python
bench: $(VENV)/dev-installed core $(if $(filter .venv-peer/%,$(PEER)),.venv-peer/built)
	@$(BIN)/python -m benchmarks.against_llama_cpp --peer $(PEER) $(BENCH)

# SERVER: a llama-server built for this CPU, instead of building one; BENCH: options, such as --rounds 5.
SERVER ?= .venv-peer/llama-server/bin/llama-server
bench-serving: $(VENV)/dev-installed core $(if $(filter .venv-peer/%,$(SERVER)),$(SERVER))
	@$(BIN)/python -m benchmarks.serving --peer $(SERVER) $(BENCH)

.venv-peer/llama-server/bin/llama-server: | .venv-peer/built
	@echo "Building llama.cpp's server for this CPU in .venv-peer: once, about 10 minutes on 2 cores."
	.venv-peer/bin/pip install --quiet --disable-pip-version-check cmake ninja
	.venv-peer/bin/pip download --quiet --disable-pip-version-check --no-deps --no-binary=llama-cpp-python \
		--dest .venv-peer llama-cpp-python==0.3.36
	tar -xzf .venv-peer/llama_cpp_python-0.3.36.tar.gz -C .venv-peer
	PATH="$$PWD/.venv-peer/bin:$$PATH" cmake -G Ninja -S .venv-peer/llama_cpp_python-0.3.36/vendor/llama.cpp \
		-B .venv-peer/llama-server -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_USE_PREBUILT_UI=OFF
	PATH="$$PWD/.venv-peer/bin:$$PATH" cmake --build .venv-peer/llama-server --target llama-server

# pip's cache is left out: it may hold a build for another CPU.
.venv-peer/built:
	@echo "Building llama.cpp for this CPU in .venv-peer: once, about 6 minutes on 2 cores."
	$(PYTHON) -m venv --clear .venv-peer
	CMAKE_ARGS=-DGGML_NATIVE=ON .venv-peer/bin/pip install --quiet --disable-pip-version-check --no-cache-dir \
		--no-binary=llama-cpp-python llama-cpp-python==0.3.36
	@touch $@

# After a change in benchmarks/results/ or docs/templates/.
docs: $(VENV)/dev-installed core
	@$(BIN)/python -m benchmarks.write_performance
	@$(BIN)/python -m benchmarks.plan_errors

# The variable silences a notice that Material for MkDocs ends in 2027 (docs/DEPENDENCIES.md).
site: $(VENV)/dev-installed
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo build/site/index.html

# What an earlier build left is deleted: it would be packed too, with modules that are gone.
DIST ?= dist
wheel: $(VENV)/installed
	@rm -rf build/lib.* build/bdist.*
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir $(DIST) .
	@ls $(DIST)

clean:
	rm -rf build dist *.egg-info tandem/native/libtandem.so
