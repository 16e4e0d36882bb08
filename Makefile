PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: check format
check: ## format, lint, types, import rules, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -m "not process and not slow" tests

format: ## rewrite the code in the house's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
