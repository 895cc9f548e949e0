# Everything that a person or CI does here. `make help` lists it.
PYTHON ?= python3
# An index with the CPU build of torch spares several GB of CUDA on x86-64 Linux.
TORCH_INDEX_URL ?=
NOTICE ?= all
VICTIM ?= other
NOTICE_S ?= 20
NODES ?= processes
BENCH ?=

BIN := .venv/bin
READY := .venv/.ready
export PYTHONPATH := .:layers/holdfast:functions:training_image:cli
export SAM_CLI_TELEMETRY := 0
.DEFAULT_GOAL := help
.PHONY: help run test check fast up down bench build clean setup

help: ## this list
	@awk -F':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## the environment in .venv; every other target makes it when it is missing
$(READY): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON); set PYTHON=/path/to/python3.11 .. 3.13"; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit(f"Python {v[0]}.{v[1]}: 3.11 to 3.13 is needed; set PYTHON")'
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX_URL),$(BIN)/pip install -q --index-url $(TORCH_INDEX_URL) "$$(grep ^torch== requirements.txt)")
	$(BIN)/pip install -q -r requirements.txt
	$(BIN)/pip install -q --no-deps -e .
	@touch $@

run: $(READY) ## the main job, live (NOTICE=all|event|metadata|none VICTIM=leader|other NODES=processes|containers), or SCENARIO=name|all|failures
ifdef SCENARIO
	@$(BIN)/python -m local.scenarios $(SCENARIO)
else
	@$(BIN)/python -m local.story --notice $(NOTICE) --victim $(VICTIM) --notice-s $(NOTICE_S) --nodes $(NODES)
endif

test: $(READY) ## all tests
	$(BIN)/python -m pytest --durations=10

check: $(READY) ## lint, types and the fast tests, under 30 s
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -m "not cloud and not ranks and not searches" tests/domain tests/application tests/messages tests/contract tests/architecture tests/template tests/docs

up: $(READY) ## keep an embedded cloud running, and say how to use it
	@$(BIN)/python -m local.up

down: $(READY) ## end it
	@$(BIN)/python -m local.down

bench: $(READY) ## one benchmark: make bench BENCH=name; without a name it lists them
	@test -n "$(BENCH)" || { echo "which? BENCH=$$(ls bench/*.py | xargs -n1 basename -s .py | grep -Ev "table|altered|_list|_rank|plain" | tr _ - | paste -sd'|')"; exit 2; }
	@$(BIN)/python -m bench.$(subst -,_,$(BENCH))

build: ## sam build, in an environment of its own (SAM CLI wants another botocore); needs a real python3.13
	@bash local/build.sh

clean: ## remove environments and outputs
	rm -rf .venv .venv-sam .aws-sam out .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
