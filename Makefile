# Every target sets up what it needs: a virtual environment in .venv with the package and its tools.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
HASHED := $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes
SOURCES := $(shell find src csrc conformance -name '*.py' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.hpp' -o -name '*.md') pyproject.toml conformance/pyproject.toml CMakeLists.txt

# What torch 2.8 to 2.14 bring beside the version that is installed here, the last of each minor version; and a numpy with
# which all of their interpreters run.
TRITONS := 3.4.0 3.5.1 3.6.0 3.7.1 3.8.0
TRITON := triton==3.9.0
NUMPY := numpy==2.3.5

SANITIZERS := address undefined thread
# torch and tensordict of each environment; the first has the oldest of everything that pyproject.toml allows.
COMPATIBILITY := 2.6.0/0.7.2 2.10.0/0.10.0 2.10.0/0.13.0 2.13.0/0.13.0 2.13.0/0.15.3
COMPATIBLE := tests/test_lazy.py tests/test_distillation.py tests/estimators tests/schema tests/replay/test_buffer.py \
	tests/replay/test_mixture.py tests/rollout tests/statistics tests/concurrent/test_prefetch.py
OLDEST := numpy==1.26.4 gymnasium==1.1.0
BASELINE := e26eac50af766fd3c26911e5a44a5ef22a2a94b1
PINNED_torchrl := torch==2.14.1 torchrl==0.14.1
PINNED_agilerl := torch==2.13.0 agilerl==2.58.0 peft==0.21.2 pytest
ORIGINALS := --checkouts build/originals --python agilerl=.venv/agilerl/bin/python --path embodichain=build/originals/wheels
# Tests run in a process per core, at most 8: each needs 10 s to import everything, and a gigabyte.
PARALLEL := -n logical --maxprocesses 8 --dist worksteal
APART := build/originals/apexrl/src:build/originals/rl_buffer/src:build/originals/wheels

.PHONY: demo gpu-report test test-all test-long tritons kernels sanitize $(SANITIZERS:%=sanitize-%) bench bench-full baseline conformance conformance-keep originals originals-full compatibility check stub format docs clean

demo: .venv/package
	$(BIN)/python -m examples.demo

# A selection over everything: each public name, adapter, promise and conformance case at least once. Minutes.
# On a device: make test DEVICE=cuda (or mps, xpu) runs the tests that take one.
test: .venv/installed
	$(BIN)/python -m pytest $(if $(DEVICE),tests/devices tests/kernels/compiling --device $(DEVICE),-m "not long and not thorough" $(PARALLEL) --durations=15)

# Every test but the long ones, which is also what pytest runs by itself.
test-all: .venv/installed
	$(BIN)/python -m pytest $(PARALLEL) --durations=15

# Hours in full, and at its end what was tried and how long each part took. A part: make test-long PART=tests/faults/test_k_machines.py
# RELIVE_A1_LONG=500 and the like (docs/reliability.md) make a part shorter.
test-long: .venv/installed
	$(BIN)/python -m pytest -m long -v --durations=15 $(PART)

# A gigabyte, a minute and a half: other versions of Triton, for the thorough tests that compile every kernel with each of them.
tritons: $(TRITONS:%=build/triton/%)

build/triton/%: | .venv/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ triton==$*

build/triton/numpy: | .venv/python
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile --target $@ $(NUMPY)

# Half an hour: each version of Triton compiles every kernel for three GPUs, and its interpreter's results are compared.
kernels: .venv/installed tritons build/triton/numpy
	for version in $(TRITONS); do \
		PYTHONPATH=build/triton/$$version:src:. $(BIN)/python -m benchmarks.compile_kernels --may-spill || exit 1; \
		PYTHONPATH=build/triton/$$version:build/triton/numpy $(BIN)/python -m pytest -m "not thorough" $(PARALLEL) \
			-W "ignore:Conversion of an array:DeprecationWarning" tests/kernels/triton || exit 1; \
	done

# The native core built with a sanitizer, in build/sanitize-*: a planted mistake is reported, and the tests have none.
sanitize: $(SANITIZERS:%=sanitize-%)

$(SANITIZERS:%=sanitize-%): sanitize-%: .venv/installed
	$(BIN)/python -m tests.sanitizers $*

# About twelve minutes: for a look, not for claims; the results stay out of git.
# On a device: make bench DEVICE=cuda times the calls there beside the buffers of others, and writes a page.
bench: .venv/bench
	$(BIN)/python -m $(if $(DEVICE),benchmarks.devices --device $(DEVICE),benchmarks --quick)

# Checks and measures everything on your GPU; writes relive-gpu-report.md and .json to send back.
gpu-report: .venv/package
	$(BIN)/python -m relive.gpu_report

# Everything at full effort, on an idle machine: results that are kept, and the page and pictures made of them.
bench-full: .venv/bench
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.page
	$(BIN)/python docs/front_page.py

# The wheel that later versions are compared with, built from its commit: build/baseline/*.whl.
baseline: .venv/build
	rm -rf build/baseline && mkdir -p build/baseline/source
	git archive $(BASELINE) | tar -x -C build/baseline/source
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w build/baseline build/baseline/source
	rm -rf build/baseline/source
	@ls build/baseline

# Two libraries want another tensordict than the rest, and the native part of TorchRL loads only with the torch that it was
# built for: each is asked in an environment of its own. That torch brings CUDA, 5 GB of it.
conformance: .venv/bench .venv/torchrl .venv/agilerl
	$(BIN)/relive-conformance --python .venv/torchrl/bin/python --python .venv/agilerl/bin/python

# The tables of the docs and of the README are those of the last run; so must be the files of reproductions, which a test compares.
conformance-keep: .venv/installed
	cp runs/conformance/report.json docs/conformance.json
	$(BIN)/python docs/front_page.py

# The originals' own tests on our adapters, at their commits (cloned into build/originals), and the tables of docs/migrating.
# EmbodiChain's package is taken without its dependencies: its simulator is not needed.
originals: .venv/bench .venv/agilerl build/originals/wheels
	$(PIP) tqdm
	$(BIN)/python -m tools.original_tests --clone $(ORIGINALS)
	$(BIN)/python docs/front_page.py

# Hours: also their trainers on both sides, and the time of every call.
originals-full: originals
	$(BIN)/python -m tools.original_trainers $(ORIGINALS)
	PYTHONPATH=$(APART) $(BIN)/python -m benchmarks.adapters --python .venv/agilerl/bin/python
	$(BIN)/python docs/front_page.py

build/originals/wheels:
	$(PIP) --no-deps --target $@ embodichain==0.3.2

# A selection with each pair of torch and tensordict, each torch in an environment of its own. Those but 2.13.0 bring CUDA, 5 GB each,
# unless pip is told of an index without it (PIP_INDEX_URL).
compatibility: $(COMPATIBILITY:%=.venv/compatibility/%)

.venv/compatibility/%: build/compatibility
	$(PYTHON) -m venv .venv/torch-$(*D)
	.venv/torch-$(*D)/bin/pip install --quiet --disable-pip-version-check torch==$(*D) tensordict==$(*F) pytest pytest-xdist hypothesis \
		$(if $(filter 2.6.0,$(*D)),$(OLDEST)) $</*.whl
	.venv/torch-$(*D)/bin/pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $</*.whl
	.venv/torch-$(*D)/bin/python -m pytest -m "not long and not thorough" $(PARALLEL) $(COMPATIBLE)
	mkdir -p $(@D) && touch $@

build/compatibility: .venv/build $(SOURCES)
	rm -rf $@
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w $@ .

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# The stub of the native core, as it is installed.
stub: .venv/installed
	$(BIN)/python -m nanobind.stubgen --quiet -m relive.kernels._native -o src/relive/kernels/_native.pyi

docs: .venv/docs
	$(BIN)/mkdocs build --strict
	@echo "site/index.html"

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.venv/python:
	$(PYTHON) -m venv .venv
	touch $@

# The tools that build and check are installed by hash; torch and users' libraries by version, because their files differ by machine.
.venv/build: .venv/python requirements/build.txt
	$(HASHED) -r requirements/build.txt
	touch $@

# Both packages are built here and nowhere else, with what the demo needs: rich, and matplotlib for its learning curve.
.venv/package: .venv/build constraints.txt $(SOURCES)
	$(PIP) --no-build-isolation --no-deps . ./conformance
	$(PIP) "relive[cli,plots]" relive-conformance
	touch $@

# "relive[...]" is the package that is installed already: pip adds what the extra asks for, and builds nothing.
# With a DEVICE torch's wheel may be one of CUDA, which asks for its own Triton.
.venv/installed: .venv/package requirements/check.txt
	$(HASHED) -r requirements/check.txt
	$(PIP) "relive[dev]" $(if $(DEVICE),,$(TRITON))
	touch $@

.venv/docs .venv/bench: .venv/%: .venv/installed
	$(PIP) "relive[$*]"
	touch $@

.venv/torchrl .venv/agilerl: .venv/%: .venv/python constraints.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet --disable-pip-version-check gymnasium==1.4.0 rich $(PINNED_$*)

clean:
	rm -rf .venv build dist
