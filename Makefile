# Two commands: `make demo` installs and trains, `make test` installs and tests.
PYTHON ?= python3
PIP_INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
# Many times as fast where much is installed; it looks for wheels where pip does.
UV = .venv/bin/uv
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# uv compiles nothing: what it installs is compiled where it is first imported, and not again by each process of a test.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test nightly install lint types unit integration beside coverage lowest newest audit pins clean

demo: .venv/demo
	.venv/bin/python -m lit_grpo fit --config configs/arithmetic.yaml

# For every change; meant to take less than 15 minutes on two cores. It proves each mechanism once: of a table of alike rows,
# one of each kind. docs/architecture.md says what is where.
test: lint unit
	$(MAKE) --no-print-directory --jobs 2 integration beside

# What takes long and seldom breaks: the other rows of those tables, every benchmark in its quick form, real vLLM servers that
# are killed, clusters, every command of the documentation, more random settings, and the unit tests on the lowest versions.
nightly: .venv/dev
	LIT_GRPO_FUZZ=400 .venv/bin/python -m pytest -m "nightly or fuzz" --numprocesses 2 --dist loadfile --durations 10
	$(MAKE) --no-print-directory lowest

# The types, in what integration tests leave of the cores: they wait for processes for a third of their time.
beside: .venv/dev
	@mkdir -p .venv/logs
	@nice -n 19 $(MAKE) --no-print-directory types > .venv/logs/beside 2>&1; code=$$?; cat .venv/logs/beside; exit $$code

install: .venv/dev

# torch first: the constraint keeps pip from taking a newer build for the packages that need it.
.venv/demo: pyproject.toml constraints.txt
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e .
	touch $@

.venv/dev: .venv/demo
	$(PIP_INSTALL) uv
	$(UV) pip install --quiet --python .venv -c constraints.txt -e ".[dev]"
	# vLLM's CPU build asks for these; the builds that an index has are for CUDA, and transformers cannot import them.
	$(UV) pip uninstall --quiet --python .venv torchvision torchaudio torchcodec
	touch $@

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/dev
	.venv/bin/basedpyright --level error

# Tests start processes of their own; one thread each keeps them from waiting for each other's cores.
unit integration nightly lowest newest: export OMP_NUM_THREADS = 1

unit: .venv/dev
	.venv/bin/python -m pytest -m "not integration and not nightly" --ignore tests/integration --numprocesses 2 --dist loadfile --durations 5

integration: .venv/dev
	.venv/bin/python -m pytest -m "integration and not nightly" --numprocesses 3 --dist loadfile --durations 10

# Which lines no test runs. No part of `test`, for it makes what runs in the tests' own processes take half as long again.
coverage: export OMP_NUM_THREADS = 1
coverage: .venv/dev
	.venv/bin/python -m pytest --cov --cov-report= --numprocesses 3 --dist loadfile
	.venv/bin/python -m coverage report --skip-covered --fail-under 90

# Versions other than those of constraints.txt, each kind in an environment of its own.
NEWEST_PYTHON ?= 3.13
UNIT_TESTS = -m pytest -m "not integration" --ignore tests/integration --numprocesses 2 --dist loadfile
THREE_UPDATES = -m lit_grpo fit --config configs/arithmetic.yaml --trainer.max_steps 3

# The lowest that pyproject.toml allows of each package that it names, on the Python of .venv. All but torch, whose build is
# large: TORCH= (nothing) takes the lowest of it too.
TORCH ?= $(shell grep ^torch== constraints.txt)

.venv-lowest/done: pyproject.toml .venv/dev
	$(UV) venv --quiet --clear --python .venv/bin/python .venv-lowest
	$(if $(TORCH),$(UV) pip install --quiet --python .venv-lowest $(TORCH))
	$(UV) pip install --quiet --python .venv-lowest --resolution lowest-direct -e ".[all,test]"
	touch $@

lowest: .venv-lowest/done
	.venv-lowest/bin/python $(UNIT_TESTS)
	.venv-lowest/bin/python $(THREE_UPDATES) --run.dir .venv-lowest/runs

# The newest of everything, on a newer Python.
newest: .venv/dev
	$(UV) venv --quiet --clear --python $(NEWEST_PYTHON) .venv-newest
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
