# Two commands: `make demo` installs and trains, `make test` installs and tests.
PYTHON ?= python3
PIP_INSTALL = .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test install lint types unit integration clean

demo: .venv/demo
	.venv/bin/python -m lit_grpo fit --config configs/arithmetic.yaml

test: lint types unit integration
	.venv/bin/python -m coverage combine --quiet
	.venv/bin/python -m coverage report --skip-covered --fail-under 90

install: .venv/dev

# torch first: the constraint keeps pip from taking a newer build for the packages that need it.
.venv/demo: pyproject.toml constraints.txt
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e .
	touch $@

.venv/dev: .venv/demo
	$(PIP_INSTALL) -e ".[dev]"
	# vLLM's CPU build asks for these; the builds that an index has are for CUDA, and transformers cannot import them.
	.venv/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/dev
	.venv/bin/basedpyright --level error

# Tests start processes of their own; one thread each keeps them from waiting for each other's cores.
unit integration: export OMP_NUM_THREADS = 1

unit: .venv/dev
	.venv/bin/python -m coverage run -m pytest -m "not integration" --numprocesses 2 --dist loadfile --durations 5

integration: .venv/dev
	.venv/bin/python -m coverage run -m pytest -m integration --numprocesses 2 --dist loadfile --durations 10

clean:
	rm -rf .venv .coverage .coverage.* .pytest_cache .ruff_cache
