# Every target does its own set-up (setup.sh): quick and silent when nothing is missing.
PYTHON := .venv/bin/python

.PHONY: help setup demo test lab engines bench lock format clean

help:
	@echo 'make demo     trace a badly configured KV-cache workload, apply what is proposed, compare'
	@echo '          ENGINE=vllm: a real server instead (some GB are installed the first time)'
	@echo 'make test     linters, types, import contracts, all tests; PYTEST="..." are its options'
	@echo 'make lab      every case in guests with other kernels; PYTEST="-k NAME" chooses'
	@echo 'make engines  tests on real engines; installs them, some GB'
	@echo 'make bench    measure what the README quotes'
	@echo 'make setup    only the set-up; make lock, make format, make clean'

setup:
	@./setup.sh

demo: setup
ifdef ENGINE
	@./setup.sh engines $(ENGINE)
	@$(PYTHON) demo_engine.py $(ENGINE)
else
	@$(PYTHON) demo.py
endif

test:
	@./setup.sh lab
	@$(PYTHON) -m ruff check --quiet
	@$(PYTHON) -m ruff format --check --quiet
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports --no-logo
	@$(PYTHON) -m pytest $(PYTEST)

# `make test` runs the few cases marked core; -m "" is all of them.
lab:
	@./setup.sh lab
	@$(PYTHON) -m pytest -m "" tests/lab $(PYTEST)

engines:
	@./setup.sh engines
	@$(PYTHON) -m pytest -m live tests/live $(PYTEST)

bench:
	@./setup.sh bench
	@$(PYTHON) -m benchmarks

# Exact versions and hashes for every supported Python, from the two lists in pyproject.toml.
lock:
	@tool=$$(mktemp -d) && trap 'rm -rf "$$tool"' EXIT && \
	$(PYTHON) -m venv "$$tool" && "$$tool/bin/python" -m pip install -qq uv && \
	"$$tool/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --upgrade --group dev --custom-compile-command 'make lock' --output-file requirements.lock \
	    pyproject.toml

format: setup
	@$(PYTHON) -m ruff check --fix --quiet
	@$(PYTHON) -m ruff format --quiet

clean:
	@rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
