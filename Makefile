# Everything runs in .venv, which the targets make and keep up to date themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install demo test test-slow bench lint options train clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## make .venv with everything that is needed (once)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: $(READY)  ## six conditions on the embedded model and problems, and their table (minutes)
	$(BIN)/python -m dflash_mcmc -m experiment=demo condition=greedy,temp,ps,blend_greedy,blend_ps,draft_blend_ps

test: $(READY)  ## the tests, two at a time (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)  ## the long campaigns too (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow'

bench: $(READY)  ## speed and memory of the engine, as tables (half an hour)
	$(BIN)/python -m dflash_mcmc.bench

lint: $(READY)  ## style and errors that can be seen without running
	$(BIN)/ruff check dflash_mcmc tests

options: $(READY)  ## every option of every configuration group
	@$(BIN)/python -m dflash_mcmc.catalogue

train: $(READY)  ## train the embedded model again (an hour)
	$(BIN)/python -m dflash_mcmc.train model=tiny

clean:  ## remove .venv and caches; runs in outputs/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
