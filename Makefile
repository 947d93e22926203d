# Needs python3 (3.11 or newer), make and git; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
STUBS := headrace/rpc
PROMPT ?= Explain what photosynthesis is, in two sentences.

.DEFAULT_GOAL := help
.PHONY: help setup demo test check protos protos-fresh up down bench clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-14s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Headrace needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' \
		|| { echo "This Python cannot make environments: install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]' --group dev
	@touch $@

demo: setup ## fetch the demo models and answer one question through all processes
	$(BIN)/headrace run --weights streamed "$(PROMPT)"

test: setup ## fetch the demo models and run the tests
	$(BIN)/headrace models fetch demo
	$(BIN)/python -m pytest

check: setup protos-fresh ## lint, format, types, imports, generated code
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The virtual path makes the generated imports absolute.
protos: setup ## generate the gRPC code from protos/
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I$(STUBS)=protos \
		--python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=only_async,quiet:. \
		$(patsubst protos/%,$(STUBS)/%,$(wildcard protos/*.proto))

protos-fresh: protos ## fail when the committed gRPC code is stale
	@stale="$$(git status --porcelain '$(STUBS)/*_pb2*')"; test -z "$$stale" \
		|| { echo "Commit what make protos changed:"; echo "$$stale"; exit 1; }

up: setup ## fetch the demo models and start with docker compose
	$(BIN)/headrace models fetch demo
	docker compose up --build --detach --wait

down: ## stop what up started and remove it, with its data
	docker compose down --volumes

bench: setup ## run the benchmarks; each prints its rows and writes JSON
	@for benchmark in benchmarks/[!_]*.py; do echo "$$benchmark"; $(BIN)/python "$$benchmark" || exit 1; done

clean: ## remove the environment and every cache of this checkout
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
