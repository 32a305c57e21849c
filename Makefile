# `make` lists what there is. Every target that needs .venv builds it first.
.DEFAULT_GOAL := help
SHELL := /bin/bash

# Which Python builds .venv, and which engine build goes into it: cpu or gpu.
PYTHON ?= python3
HARDWARE ?= cpu
# The stack `make serve` starts: a name from configs/stacks or a path.
STACK ?= demo

BIN := .venv/bin
STAMP := .venv/.set-up-for-$(HARDWARE)

.PHONY: help setup serve test test-unit bench lint format constraints clean clean-all

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Build .venv (PYTHON=python3.11, HARDWARE=cpu|gpu); nothing to do when up to date

$(STAMP): pyproject.toml constraints.txt scripts/setup-venv scripts/torchvision_operators.py
	PYTHON=$(PYTHON) scripts/setup-venv $(HARDWARE)
	@rm -f .venv/.set-up-for-*
	@touch $@

serve: setup ## Start the stack and stream tokens (STACK=demo)
	$(BIN)/moe-serving up $(STACK)

test: setup ## Run every test, on the real stack too
	$(BIN)/pytest

test-unit: setup ## Run the tests that start no engine
	$(BIN)/pytest -m "not integration"

bench: setup ## Measure what the stack adds to a bare vLLM server
	$(BIN)/moe-serving bench overhead

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
