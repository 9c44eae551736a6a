# Everything a newcomer needs: `make demo` (the main job on real images) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing dp-pretrain and what it needs into $(VENV) (once; torch is large) ..."
	$(BIN)/python -m pip install --quiet --editable ".[test,demo,bench]"
	@touch $@

demo: setup
	$(BIN)/python jobs/fetch_demo_images.py
	$(BIN)/dp-pretrain run jobs/recipes/demo.yaml

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --durations=15
