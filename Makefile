# Every target makes what it needs; with the environment up to date that takes no time.
#   make env TRANSFORMERS=5.19.0 VENV=.venv-5.19     another release of transformers, in an environment of its own

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
TRANSFORMERS ?= 5.24.0
CHECKPOINTS ?= smollm2 toy-gpt2

PACKAGES := nnterp-families-dense nnterp-families-moe nnterp-families-recurrent nnterp-vision nnterp-vllm
TOOLS := accelerate build hatchling pillow pytest-xdist ruff==0.17.6
BIN := $(VENV)/bin
READY := $(VENV)/.ready-torch$(TORCH)-transformers$(TRANSFORMERS)

.PHONY: env demo test bench lint format clean

env: $(READY)

$(READY): Makefile pyproject.toml $(wildcard nnterp-*/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("nnterp needs Python 3.10 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.ready-*
	@echo "Installing torch $(TORCH) and transformers $(TRANSFORMERS) into $(VENV) (once, a minute or two)"
	$(BIN)/python -m pip install --disable-pip-version-check torch==$(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check torch==$(TORCH) transformers==$(TRANSFORMERS) $(TOOLS) \
		-e 'nnterp-core[demo,testing]' $(addprefix -e ./,$(PACKAGES)) -e .
	@touch $@

demo: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/nnterp demo $(CHECKPOINTS)

# ARGS="-k gpt2" narrows it down
test: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 $(ARGS)

bench: $(READY)
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python tests/bench

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv* .pytest_cache .ruff_cache dist nnterp-*/dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
