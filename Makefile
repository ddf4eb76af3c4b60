# `make demo` and `make test` set up what they need: one environment for each version of pyproject.toml, kept in a
# cache folder outside the checkout. PYTHON chooses the interpreter, VITINIT_CACHE the folder.
PYTHON ?= python3
VITINIT_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/vitinit
KEY := $(shell { cat pyproject.toml; $(PYTHON) --version; } | $(PYTHON) -c "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest()[:12])")
VENV := $(VITINIT_CACHE)/venv-$(KEY)
BIN := $(VENV)/bin
export PYTHONPATH := $(CURDIR)

.PHONY: demo test lint
demo: $(VENV)/ready
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
		finetune.py --recipe digits_10pct --overwrite

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The package itself is not kept in the environment: several checkouts share it, each with its own code.
$(VENV)/ready:
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet ".[dev]"
	$(BIN)/pip uninstall --quiet --yes vitinit
	rm -rf build vitinit.egg-info
	touch $@
