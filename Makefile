# Everything a developer needs. `make` lists the targets; each does all the set-up that it needs.
# Recipes `exec` what may start something: a signal to make then reaches that and not a shell.

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

# The first Python that is new enough; `make PYTHON=…` names another one.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	command -v $$p >/dev/null 2>&1 \
	&& $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$p && break; done)
PYTHON := $(PYTHON)
SERVICES = $(PYTHON) tools/services.py
BIN = .venv/bin
ARGS ?=

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer, found" \
		"$$(python3 --version 2>&1 || echo none); install one or run make PYTHON=/path/to/python" >&2; \
		exit 1; }

.PHONY: packages
packages: python ## install the system packages that are missing (Debian; root or sudo)
	@exec $(SERVICES) install

.PHONY: venv
venv: packages ## make .venv with the project and its development tools
	@$(PYTHON) tools/venv.py --dev

.PHONY: venv-run
venv-run: packages
	@$(PYTHON) tools/venv.py

.PHONY: services
services: packages ## start a private RabbitMQ and PostgreSQL and leave them running
	@exec $(SERVICES) start

.PHONY: services-stop
services-stop: python ## stop them
	@$(SERVICES) stop

.PHONY: demo
demo: venv-run ## show the worker at work, with services of its own or those of `make services`
	@exec $(SERVICES) run -- $(BIN)/volume-worker demo

.PHONY: test
test: venv ## run the tests likewise; ARGS="-k text tests/unit" go to pytest
	@exec $(SERVICES) run -- $(BIN)/python -m pytest -n 2 $(ARGS)

.PHONY: faults
faults: venv ## kill a worker at each crash point of each method, and print the table; takes 20 minutes
	@exec $(SERVICES) run -- $(BIN)/python -m pytest -n 2 -m faults tests/faults $(ARGS)

.PHONY: soak
soak: venv ## mixed load while one thing after the other fails, for SECONDS=1800; SOAK_SEED=… makes another
	@SOAK_SECONDS=$(or $(SECONDS),1800) exec $(SERVICES) run -- \
		$(BIN)/python -m pytest tests/faults/test_soak.py $(ARGS)

.PHONY: venv-bench
venv-bench: packages
	@$(PYTHON) tools/venv.py --bench

.PHONY: bench
bench: venv-run venv-bench ## measure: beside other RPC over RabbitMQ, and at scale; takes ten minutes
	@exec $(SERVICES) run -- $(BIN)/python bench/rpc.py $(ARGS)
	@exec $(SERVICES) run -- $(BIN)/python bench/scale.py

.PHONY: lint
lint: venv ## ruff and import-linter
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

.PHONY: types
types: venv ## mypy
	$(BIN)/mypy

.PHONY: check
check: lint types ## lint and types

.PHONY: compose-check
compose-check: ## whether a compose program takes compose.yaml; tests/unit/test_compose.py needs none
	@if docker compose version >/dev/null 2>&1; then compose="docker compose"; \
	elif command -v docker-compose >/dev/null 2>&1; then compose=docker-compose; \
	else echo "compose-check: not checked: no compose program here;" \
		"tests/unit/test_compose.py checks what can be checked without one"; exit 0; fi; \
	$$compose -f compose.yaml config >/dev/null && echo "compose-check: compose.yaml is valid ($$compose)"
