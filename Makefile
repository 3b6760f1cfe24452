# Two commands for a newcomer, each doing all its set-up:
#   make emulate   capture the main job, run one rank of it, show what came out
#   make test      run the tests
#   make sanitize  run the C++ tests of the replay engine under the sanitizers
# STACK=gpu uses the locked requirements of the GPU stack instead.

PYTHON ?= python3
STACK ?= cpu
VENV ?= .venv
RUN := $(VENV)/bin/python
JOB ?= gpt-512
RANK ?= 137
RESULTS ?= results/$(JOB)

.PHONY: emulate test sanitize lint venv build clean help
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.ready

$(VENV)/.ready: requirements/$(STACK).txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. $(PYTHON) is older. Pass PYTHON=python3.12, say."; exit 2; }
	@echo "Setting up $(VENV) (a few minutes the first time) …"
	@$(PYTHON) -m venv $(VENV) 2>/dev/null || \
	  { $(PYTHON) -m pip install --quiet virtualenv && $(PYTHON) -m virtualenv --quiet $(VENV); }
	$(RUN) -m pip install --quiet --requirement requirements/$(STACK).txt
	$(RUN) -m pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

build: venv
	@echo "Building the native extension (a minute the first time) …"
	@$(RUN) -c 'from crystalllm import native; print(native.build()); print(native.replay_library())'

emulate: build
	@echo "Capturing $(JOB): some ranks run, the others are inferred (under a minute on 2 cores) …"
	$(RUN) -m crystalllm capture --job $(JOB) --strategy roles --out $(RESULTS)/capture
	$(RUN) -m crystalllm inspect $(RESULTS) --summary
	@echo "Running rank $(RANK) with what the others really send …"
	$(RUN) -m crystalllm run --job $(JOB) --rank $(RANK) --strict \
	  --book $(RESULTS)/capture/payloads.parquet \
	  --record $(RESULTS)/run/rank-$(RANK).parquet --summary $(RESULTS)/run/rank-$(RANK).json
	$(RUN) -m crystalllm calls $(RESULTS)/run/rank-$(RANK).parquet
	@echo "Results are in $(RESULTS). Look further with:"
	@echo "  $(RUN) -m crystalllm inspect $(RESULTS)"
	@echo "  $(RUN) -m crystalllm inspect $(RESULTS) --coord pp=5,tp=0"
	@echo "  $(RUN) -m crystalllm run --job $(JOB) --rank 511 --book $(RESULTS)/capture/payloads.parquet"

test: build
	$(RUN) -m pytest -q

sanitize:
	@$(MAKE) --no-print-directory -C nccl/replay sanitize OBJECTS=$(CURDIR)/build/sanitize

lint: venv
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

clean:
	rm -rf $(VENV) build results
