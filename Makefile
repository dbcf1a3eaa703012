# Two commands a newcomer needs: `make demo` and `make test`. Everything installs into .venv; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Small models and two-core machines: one thread per process is faster than several that fight.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow torture test-gpu check stubs docs pictures clean zoo

demo: $(VENV)/.demo
	$(BIN)/python -m drivetrain demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadscope --durations=10

# More plans, schedules and kills of the same kinds. Before a release, and after a change to strategy/, module/, checkpoint/,
# runtime/ or the experiment's processes; CI does not run it.
test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m "slow or peers" --timeout 1800

# Kills, stops, damaged input, long histories and bad disks, counted (docs/reliability.md). The whole takes hours: SHARE=0.05 does a part.
SHARE ?= 1
torture: $(VENV)/.dev
	$(BIN)/python -m benchmarks.torture --share $(SHARE) --output benchmarks/results/torture.json

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typed_script.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Every model of benchmarks/zoo; those of transformers and timm where they are installed.
zoo: $(VENV)/.dev
	$(BIN)/python -m benchmarks.zoo --out benchmarks/results/zoo.json --table docs/zoo.md

stubs: $(VENV)/.dev
	$(BIN)/python -m tools.write_stubs

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The pictures of the documentation, from real runs; the report needs Chromium.
pictures: $(VENV)/.dev
	$(BIN)/python -m tools.pictures

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
