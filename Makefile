# Two commands: `make demo` installs and trains, `make test` installs and tests.
PYTHON ?= python3
PIP_INSTALL = .venv/bin/pip install --disable-pip-version-check -c constraints.txt
# The index that torch comes from; empty is pip's own, whose torch on Linux is the CUDA build (2.9 GB). On Linux without an NVIDIA
# GPU it is PyTorch's index of CPU builds (0.2 GB). To choose yourself: `make demo TORCH_INDEX=` or `make demo TORCH_INDEX=URL`.
GPU = $(wildcard /dev/nvidia[0-9]* /dev/nvidiactl /dev/dxg)$(shell command -v nvidia-smi 2>/dev/null)
CPU_BUILDS = https://download.pytorch.org/whl/cpu
TORCH_INDEX ?= $(if $(GPU),,$(if $(filter Linux,$(shell uname -s 2>/dev/null)),$(CPU_BUILDS)))
# Many times as fast where much is installed; it looks for wheels where pip does.
UV = .venv/bin/uv
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# uv compiles nothing: what it installs is compiled where it is first imported, and not again by each process of a test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test nightly install lint types unit integration coverage lowest newest audit pins clean

demo: .venv/demo
	.venv/bin/python -m lit_grpo fit --config configs/arithmetic.yaml

# For every change; meant to take at most 10 minutes on two cores. It proves each mechanism once: of a table of alike rows,
# one of each kind. docs/architecture.md says what is where.
# Integration tests wait for processes for a third of their time, in which unit tests run.
test: lint types
	$(MAKE) --no-print-directory --jobs 2 integration unit

# What takes long and seldom breaks: the other rows of those tables, every benchmark in its quick form, real vLLM servers that
# are killed, clusters, commands of the documentation, more random settings, and the unit tests on the lowest versions.
nightly: .venv/dev
	.venv/bin/python tests/chromium.py --unless-installed
	LIT_GRPO_FUZZ=400 .venv/bin/python -m pytest -m "nightly or fuzz" --numprocesses 2 --dist loadfile --durations 10
	$(MAKE) --no-print-directory lowest

install: .venv/dev

# torch first and alone: the next line finds it installed, and takes what it needs from pip's own index. An index that cannot be
# reached is no error, for pip's own has a torch too.
.venv/demo: pyproject.toml constraints.txt
	@echo "Installing 1 of 3: a virtual environment in .venv"
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@echo "Installing 2 of 3: torch from $(or $(TORCH_INDEX),the index of pip)"
	@test -z "$(TORCH_INDEX)" || .venv/bin/pip install --disable-pip-version-check --no-deps --retries 1 --timeout 20 \
		--index-url "$(TORCH_INDEX)" "$$(grep ^torch== constraints.txt)" 2> .venv/torch.log \
		|| echo "$(TORCH_INDEX) gave no torch (.venv/torch.log says why), so it comes from pip's own index."
	$(PIP_INSTALL) torch
	@echo "Installing 3 of 3: lit_grpo and what it needs, pinned by constraints.txt (pip says no more until it is done)"
	$(PIP_INSTALL) --quiet -e .
	touch $@

.venv/dev: .venv/demo
	@echo "Installing what the tests need: about 200 packages, some minutes, without a further line"
	$(PIP_INSTALL) --quiet uv
	$(UV) pip install --quiet --python .venv -c constraints.txt -e ".[dev]"
	# vLLM's CPU build asks for these; the builds that an index has are for CUDA, and transformers cannot import them.
	$(UV) pip uninstall --quiet --python .venv torchvision torchaudio torchcodec
	touch $@

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/dev
	.venv/bin/pyrefly check

# Tests start processes of their own; one thread each keeps them from waiting for each other's cores.
unit integration nightly lowest newest: export OMP_NUM_THREADS = 1

UNIT_TESTS = -m pytest -m "not nightly" --ignore tests/integration --numprocesses 2 --dist loadfile --durations 5

unit: .venv/dev
	.venv/bin/python $(UNIT_TESTS)

integration: .venv/dev
	.venv/bin/python -m pytest -m "not nightly" tests/integration --numprocesses 2 --dist loadfile --durations 10

# Which lines no test runs. No part of `test`, for it makes what runs in the tests' own processes take half as long again.
coverage: export OMP_NUM_THREADS = 1
coverage: .venv/dev
	.venv/bin/python -m pytest -m "not nightly" --cov --cov-report= --numprocesses 3 --dist loadfile
	.venv/bin/python -m coverage report --skip-covered --fail-under 90

# Versions other than those of constraints.txt, each kind in an environment of its own.
NEWEST_PYTHON ?= 3.13
THREE_UPDATES = -m lit_grpo fit --config configs/arithmetic.yaml --trainer.max_steps 3

# The lowest that pyproject.toml allows of each package that it names, on the Python of .venv. All but torch, whose build is
# large: TORCH= (nothing) takes the lowest of it too.
TORCH ?= $(shell grep ^torch== constraints.txt)

.venv-lowest/done: pyproject.toml .venv/dev
	$(UV) venv --quiet --clear --seed --python .venv/bin/python .venv-lowest
	$(if $(TORCH),$(UV) pip install --quiet --python .venv-lowest $(TORCH))
	$(UV) pip install --quiet --python .venv-lowest --resolution lowest-direct -e ".[all,test]"
	touch $@

lowest: .venv-lowest/done
	.venv-lowest/bin/python $(UNIT_TESTS)
	.venv-lowest/bin/python $(THREE_UPDATES) --run.dir .venv-lowest/runs

# The newest of everything, on a newer Python.
newest: .venv/dev
	$(UV) venv --quiet --clear --seed --python $(NEWEST_PYTHON) .venv-newest
	$(UV) pip install --quiet --python .venv-newest -e ".[all,test]"
	.venv-newest/bin/python $(UNIT_TESTS)
	.venv-newest/bin/python $(THREE_UPDATES) --run.dir .venv-newest/runs

# Asks the index which of the pinned versions are known to be vulnerable; strict, for one that it does not know is no pass.
audit: .venv/dev
	$(UV) tool run pip-audit --strict --no-deps --disable-pip -r constraints.txt

# After an upgrade: pin what is installed.
pins: .venv/dev
	.venv/bin/python tests/pins.py > constraints.txt

clean:
	rm -rf .venv .venv-lowest .venv-newest .coverage .coverage.* .pytest_cache .ruff_cache
