# `make` lists what there is. Every target that needs .venv builds it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# Which Python builds .venv, and which engine build goes into it: cpu or gpu.
PYTHON ?= python3
HARDWARE ?= cpu
# The stack `make serve` starts: a name from configs/stacks or a path.
STACK ?= demo
# What `make loadtest` sends, where to, and by how many users.
URL ?= http://127.0.0.1:8000
PROMPTS ?= demo-code
USERS ?= 4

BIN := .venv/bin
STAMP := .venv/.set-up-for-$(HARDWARE)

.PHONY: help setup serve test test-unit test-stack test-faults test-slow chaos routing bench loadtest lint format constraints clean clean-all

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Build .venv (PYTHON=python3.11, HARDWARE=cpu|gpu); nothing to do when up to date

$(STAMP): pyproject.toml constraints.txt scripts/setup-venv scripts/torchvision_operators.py
	PYTHON=$(PYTHON) scripts/setup-venv $(HARDWARE)
	@rm -f .venv/.set-up-for-*
	@touch $@

serve: setup ## Start the stack and stream tokens (STACK=demo)
	$(BIN)/moe-serving up $(STACK)

test: test-unit test-stack ## Run the tests, on the real stack too; the slow ones have targets of their own

test-unit: setup ## Run the tests that start no engine
	$(BIN)/pytest -m "not integration and not slow" --numprocesses auto --dist worksteal

test-stack: setup ## Run the tests on the real stack
	$(BIN)/pytest -m "integration and not slow"

test-faults: setup ## Break the real stack in every way and count what clients see (15 min)
	$(BIN)/pytest -m "slow or not slow" tests/integration/test_faults.py tests/integration/test_full_disk.py

test-slow: setup ## Run the tests that `make test` leaves out for their length
	$(BIN)/pytest -m slow

chaos: setup ## Kill and halt parts of a stack under mixed load (10 min)
	$(BIN)/python loadtests/chaos.py

routing: setup ## Ramp 1 to 32 streams and back: the router beside each variant (22 min)
	$(BIN)/python loadtests/routing.py

bench: setup ## Measure what the stack adds to a bare vLLM server
	$(BIN)/moe-serving bench overhead

loadtest: setup ## Load a running stack for 30 s (URL=, PROMPTS=demo-code, USERS=4)
	$(BIN)/locust -f loadtests/decode.py --headless --only-summary --host $(URL) \
	  --prompts $(PROMPTS) --users $(USERS) --spawn-rate $(USERS) \
	  --max-tokens 64 --run-time 30s --stop-timeout 60s

lint: setup ## Check style, layout and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict serving

format: setup ## Fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

constraints: setup ## Write constraints.txt anew from .venv
	scripts/write-constraints
	@touch $(STAMP)

clean: ## Remove caches and build products
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

clean-all: clean ## The same, and .venv
	rm -rf .venv
