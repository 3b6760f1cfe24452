# Two commands for a newcomer, each doing all its set-up:
#   make emulate   capture the main job, plan it, emulate one rank of it, show what came out
#   make test      run the tests
#   make test-heavy  run those that take long: real worlds against emulated ones, the workflow
#   make test-report  look at the report of a small run in headless Chromium
#   make test-slurm  run the workflow on a Slurm that is started for it (as root)
#   make lint      check the style of Python and Snakemake files
#   make sanitize  run the C++ tests of the replay engine under the sanitizers
# STACK=gpu uses the locked requirements of the GPU stack instead.

PYTHON ?= python3
STACK ?= cpu
VENV ?= .venv
RUN := $(VENV)/bin/python
JOB ?= gpt-512
SNAKEMAKE := $(VENV)/bin/snakemake --cores all
# Where emulate_all leaves the main job.
RESULTS := results/$(JOB)

.PHONY: emulate test test-heavy test-report test-slurm sanitize lint venv build clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.ready

$(VENV)/.ready: requirements/$(STACK).txt requirements/workflow.txt requirements/hta.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. $(PYTHON) is older. Pass PYTHON=python3.12, say."; exit 2; }
	@echo "Setting up $(VENV) (a few minutes the first time) …"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || \
	  { $(PYTHON) -m pip install --quiet virtualenv && $(PYTHON) -m virtualenv --quiet $(VENV); }
	$(RUN) -m pip install --quiet --requirement requirements/$(STACK).txt
	$(RUN) -m pip install --quiet --requirement requirements/workflow.txt
	$(RUN) -m pip install --quiet --no-deps --requirement requirements/hta.txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

build: venv
	@echo "Building the native extension (a minute the first time) …"
	@$(RUN) -c 'from crystalllm import native; print(native.build()); print(native.replay_library())'

emulate: venv
	$(SNAKEMAKE) --quiet host reason progress --config 'jobs=[$(JOB)]' -- emulate_all
	@echo "Go on with:"
	@echo "  $(RUN) -m crystalllm anomalies $(RESULTS)"
	@echo "  $(RUN) -m crystalllm fits --job $(JOB) --memory 1GiB"
	@echo "  $(SNAKEMAKE) --config 'sweeps=[gpt-512-layouts]'"
	@echo "and open results/report/index.html, and $(RESULTS)/emulate/timeline.json.gz at https://ui.perfetto.dev"

test: build
	$(RUN) -m pytest -q -m "not heavy and not slurm and not browser"

test-heavy: build
	$(RUN) -m pytest -q -m heavy

test-report: build
	$(RUN) -m pytest -q -m browser

test-slurm: build
	$(RUN) -m pytest -q -m slurm

sanitize:
	@$(MAKE) --no-print-directory -C nccl/replay sanitize OBJECTS=$(CURDIR)/build/sanitize

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/snakefmt --check Snakefile workflow/rules
	$(VENV)/bin/snakemake --lint

clean:
	rm -rf $(VENV) build results
