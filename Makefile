# `make demo` and `make test` need Python 3.11 or newer and nothing else.
# GPU machines that already carry torch:  make gpu-check PYTHON=python3

PY ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTHON ?= $(BIN)/python
ARMS ?= all
PARTS ?=
PYTEST_ARGS ?=
PEERS_ARGS ?=
WORKERS ?= 2

.PHONY: demo test test-slow test-all hunt fuzz kill interrupt rehearsals soak disk-hour matrix test-parallel lint typed typecheck format docs bench peers plots gpu-check gpu-bench gpu-emulated gpu-hour-prepare gpu-rehearsal setup clean release integrations

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "setup: into $(VENV) go torch (some 1 GB), then memo with what its tests need: three to five minutes, once"
	@test -x $(BIN)/python || $(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

# A worker that has nothing left takes half of what the other still has; what a module shares is seldom made twice.
# What they compiled, asserts above all, is kept for the next time, whatever the environment says: it is 16 s of each worker.
SHARED_OUT = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n $(WORKERS) --dist worksteal --durations 20

# Some 1,200 seconds of processor time, of which collecting is 25 for each worker, and 40 where no compiled tests are kept yet.
test: setup
	@echo "expected: some 10 minutes on two quiet cores; the first dot after one"
	$(SHARED_OUT) -m "not gpu and not parallel and not slow" $(PYTEST_ARGS)

# One in four of the slow tests, by TURN, and those that hold a promise: tests/support/slow_tests.py. Each change has another turn.
TURN ?= $(shell printf %d 0x$$(git rev-parse HEAD | cut -c 1-6))
test-slow: setup
	@echo "expected: some 8 minutes on two quiet cores"
	$(SHARED_OUT) -m "slow and not gpu and not parallel" --turn $(TURN)/4 $(PYTEST_ARGS)

test-all: setup
	@echo "expected: some 37 minutes on two quiet cores; the first dot after one"
	$(SHARED_OUT) -m "not gpu and not parallel" $(PYTEST_ARGS)

# Every layout over gloo on this machine's processors, up to eight processes. `make test` has those not marked parallel.
test-parallel: setup
	@echo "expected: some 50 minutes on two quiet cores"
	$(BIN)/pytest tests/parallel --timeout 900 --durations 20 $(PYTEST_ARGS)

# Random programs with and without memo, bit for bit: docs/reliability.md. HUNT_ARGS="--programs 500 --seed 7" for some.
HUNT_ARGS ?= --programs 20000 --write --continue
hunt: setup
	$(BIN)/python -m tests.hunt $(HUNT_ARGS)

# Every reader of files under a coverage-guided fuzzer: docs/reliability.md. FUZZ_ARGS="--minutes 1 --readers trace" for some.
FUZZ_ARGS ?= --inputs 1000000 --write --continue
fuzz: setup
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

# Runs killed at random instants go on to the same bits: docs/reliability.md. KILL_ARGS="--kills 20 --seed 7" for some.
KILL_ARGS ?= --kills 200 --write
kill: setup
	$(BIN)/python -m tests.kill $(KILL_ARGS)

# Steps interrupted at every executed line of memo's files: docs/reliability.md. INTERRUPT_ARGS="--places 500 --seed 7" for some.
INTERRUPT_ARGS ?=
interrupt: setup
	$(BIN)/python -m tests.interrupt $(INTERRUPT_ARGS)

# 200 trainings by memo's defaults on simulated GPUs: docs/reliability.md. REHEARSALS_ARGS="--cases 12" for some.
REHEARSALS_ARGS ?= --cases 200 --longest --write
rehearsals: setup
	$(BIN)/python -m benchmarks.rehearsals $(REHEARSALS_ARGS)

# An hour of training under injected faults, bit for bit: docs/reliability.md. SOAK_ARGS="--minutes 5 --seed 7" for some.
SOAK_ARGS ?= --steps 10000 --minutes 60 --write
soak: setup
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# An hour at 20 GB a step through two directories of a disk, with drives that fail: docs/disk.md. 60 GB stay free.
DISK_HOUR_ARGS ?= --minutes 60 --write
disk-hour: setup
	$(BIN)/python -m tests.soak.disk_hour $(DISK_HOUR_ARGS)

# Versions of Python, torch and transformers, each in an environment of its own: docs/versions.md. MATRIX_ARGS="--only 3.12" for some.
MATRIX_ARGS ?= --write
matrix: setup
	$(BIN)/python -m tests.matrix $(MATRIX_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# mypy and the reference of the site see the installed shape of the package: the root folders linked under one `memo`.
typed: setup
	@rm -rf build/typed && mkdir -p build/typed/memo
	@for f in memo/*; do ln -s ../../../$$f build/typed/memo/; done
	@for d in swap allocator mip kernels; do ln -s ../../../$$d build/typed/memo/$$d; done

typecheck: typed
	cd build/typed && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p memo

# The site of docs/, in build/site: open build/site/index.html. A link that leads nowhere is an error.
docs: typed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: setup
	$(BIN)/python -m benchmarks $(ARMS)

# memo beside TRL, DeepSpeed, transformers and torch's own ways; two peers have environments of their own, from PyPI.
peers: setup build/integrations/trl/.installed build/integrations/deepspeed/.installed
	$(BIN)/python -m benchmarks.peers $(PEERS_ARGS)

# docs/results.md, its plots and README's figures, from the files of benchmarks/results.
plots: setup
	$(BIN)/python -m benchmarks.pages

# Both run with the interpreter given as PYTHON, from this tree, and install nothing; exit 3 without a GPU.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(PARTS)

gpu-bench:
	$(PYTHON) -m benchmarks.gpu_bench $(ARMS)

# Another version of torch may warn of what pyproject.toml does not know by name.
SHOWN_WARNINGS = -W default -W error::pytest.PytestUnraisableExceptionWarning

# The tests marked gpu where no GPU is, on an emulated device: tests/emulated_cuda/README.md. Fetches some 7 GB once.
# The engine's run a second time under torch's CUDA sanitizer, which tells of accesses that nothing orders.
gpu-emulated:
	PY=$(PY) tests/emulated_cuda/prepare build/emulated
	build/emulated/python -m pytest $(SHOWN_WARNINGS) -m gpu --timeout 900 --deselect tests/gpu/test_ring_cuda.py $(PYTEST_ARGS) tests/gpu tests/kernels
	TORCH_CUDA_SANITIZER=1 build/emulated/python -m pytest $(SHOWN_WARNINGS) -m gpu --timeout 900 $(PYTEST_ARGS) tests/gpu/test_swap_cuda.py tests/gpu/test_promises_cuda.py

# A quarter of an hour on a GPU: docs/gpu.md. Packs .gpu/, which then travels; `bash .gpu/gpu_hour.sh 1` to 6 run there.
gpu-hour-prepare: setup
	PYTHON=$(BIN)/python benchmarks/gpu_hour_prepare.sh .gpu

# Its parts at small size on the emulated device, most from an environment without memo or solvers: some ten minutes.
gpu-rehearsal: setup
	PY=$(PY) tests/emulated_cuda/prepare build/emulated
	PYTHON=$(BIN)/python tests/emulated_cuda/rehearse build/emulated build/rehearsal

# The packages that docs/integrations/README.md lists, each in an environment of its own, on the CPU, from PyPI.
# `make integration-trl` runs one; the environments stay under build/integrations. What is in requirements-alone.txt is
# installed without its dependencies. The root is not on the path: our kernels/ would hide the package of that name.
INTEGRATIONS = $(patsubst tests/integrations/%/requirements.txt,%,$(sort $(wildcard tests/integrations/*/requirements.txt)))
INTEGRATION_TARGETS = $(addprefix integration-,$(INTEGRATIONS))
NEEDED = numpy pulp highspy nvidia-ml-py rich pytest pytest-timeout hypothesis "setuptools>=77" wheel

.PHONY: $(INTEGRATION_TARGETS)

integrations: $(INTEGRATION_TARGETS)

$(INTEGRATION_TARGETS): integration-%: build/integrations/%/.installed
	build/integrations/$*/bin/pytest -o pythonpath=tests/support -W default -W error::RuntimeWarning $(PYTEST_ARGS) tests/integrations/$*

build/integrations/%/.installed: tests/integrations/%/requirements.txt
	@test -x build/integrations/$*/bin/python || $(PY) -m venv build/integrations/$*
	build/integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 $(NEEDED)
	build/integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 --requirement $<
	@! test -e $(<D)/requirements-alone.txt || \
	  build/integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $(<D)/requirements-alone.txt
	build/integrations/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# A wheel and an sdist in dist/, built twice and equal byte for byte, with their dependencies' list and checksums, which
# OpenSSH signs with SIGN_KEY=~/.ssh/id_ed25519: SECURITY.md.
release:
	$(PY) .ci/release.py $(if $(SIGN_KEY),--sign-key $(SIGN_KEY))

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache *.egg-info
