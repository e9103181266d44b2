# Two commands: `make demo` (no root, no Slurm, no GPU) and `make test` (real Slurm, real Apptainer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for processes; those on the cluster stay in one group.
PARALLEL := -n 3

.PHONY: help demo example-tiny-grpo test test-full lint bench bench-overlap bench-action bench-gateway bench-shards clean

help: ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(VENV)/.installed: pyproject.toml
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit("hpcroll needs Python >= 3.11: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[all,dev]'
	@touch $@

demo: $(VENV)/.installed ## rollouts on this machine, from submit to the trainer's loop
	$(BIN)/hpcroll demo

test: ## install what the tests need, then run them on a real cluster
	tests/setup/install
	tests/setup/install-agents
	tests/setup/run-tests $(PARALLEL) -m 'not full'

test-full: ## the slower proofs too
	tests/setup/install
	tests/setup/install-engine
	tests/setup/install-agents all
	tests/setup/install-consumers
	tests/setup/run-tests $(PARALLEL)

$(VENV)/.torch: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[torch]'
	@touch $@

# The control first: the last line is that of the loop that learns.
example-tiny-grpo: root := runs/tiny-grpo-$(shell date +%Y%m%d-%H%M%S)
example-tiny-grpo: $(VENV)/.torch ## a loop that learns on this machine, its parts killed on the way
	@echo "control: rewards shuffled within each group"
	PYTHONPATH=docs/examples $(BIN)/python -m tiny_grpo $(root)/control --control --steps 10 --held-out 160
	PYTHONPATH=docs/examples $(BIN)/python -m tiny_grpo $(root)/learns

lint: $(VENV)/.installed ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: bench-overlap bench-action bench-gateway bench-shards ## every benchmark

bench-overlap: ## stage overlap through the spool, in real sandboxes
	tests/setup/install
	tests/setup/run-as-user python tests/benchmarks/overlap.py

bench-action: ## latency of one action in a sandbox
	tests/setup/install
	tests/setup/run-as-user python tests/benchmarks/action.py

bench-gateway: ## what the gateway adds to a call, beside LiteLLM's proxy
	tests/setup/install
	tests/setup/install-peers
	tests/setup/run-as-user python -m tests.benchmarks.gateway

bench-shards: ## trajectories on disk, beside the formats a trainer would use else
	tests/setup/install
	tests/setup/install-agents pi mini_swe_agent codex opencode
	tests/setup/install-shard-peers
	tests/setup/run-as-user python -m tests.benchmarks.shards

clean: ## remove what setup made in this checkout
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
