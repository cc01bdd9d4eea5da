# Everything starts here: `make demo` shows the main job, `make test` checks the code. Each target makes .venv first.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
PY := .venv/bin/python
PIP_FLAGS := -qq --disable-pip-version-check --no-input
TRANSFORMERS := 5.24.0
OTHER := .transformers/$(TRANSFORMERS)
LLAMACPP := .venv-llamacpp/bin/python
export PYTHONWARNINGS ?= ignore::SyntaxWarning
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test slow lint test-other clean help

help:
	@echo "make demo [FAST=1]  Hydra heads and EAGLE-3 learn, score tables at T = 0 and T = 1, report"
	@echo "make test           lint, types, fast tests"
	@echo "make slow           the slow tests"
	@echo "make lint | test-other [TRANSFORMERS=5.24.0] | clean"

.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: PYTHON: no Python 3.11 or newer found; install one, or make PYTHON=/path/to/python"; exit 2; }
	@echo "[1/2] creating .venv with $(PYTHON)"
	@test -x $(PY) || $(PYTHON) -m venv .venv || { echo "error: .venv: could not be created; install Python's venv module"; exit 2; }
	@echo "[2/2] installing the pinned packages (a minute or two)"
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv
	@$(PY) scripts/demo.py fast=$(if $(filter-out 0,$(FAST)),true,false)

lint: .venv
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet . || { echo "error: lint: not laid out by the formatter; run $(PY) -m ruff format ."; exit 1; }
	@$(PY) -m mypy

test: lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m "not slow"

slow: .venv
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m slow

# What hangs most on transformers, with another version of it laid over .venv (130 MB).
$(OTHER): | .venv
	@rm -rf $@.part
	@$(PY) -m pip install $(PIP_FLAGS) --no-deps --target $@.part transformers==$(TRANSFORMERS)
	@mv $@.part $@

test-other: $(OTHER)
	@OMP_NUM_THREADS=1 PYTHONPATH=$(OTHER) $(PY) -m pytest -n 2 -m "not slow" tests/test_golden.py tests/contract \
		tests/heads/test_parity.py tests/heads/test_head_archs.py tests/decode/test_weights.py tests/decode/test_target.py \
		tests/decode/test_cache.py tests/train/test_templates.py

# One wheel of 34 MB with llama.cpp's whole server, prebuilt for Linux; no compiler, no GPU.
.venv-llamacpp/.installed:
	@test -x $(LLAMACPP) || $(PYTHON) -m venv .venv-llamacpp
	@echo "installing xllamacpp 2026.10.11549 (llama.cpp) into .venv-llamacpp"
	@$(LLAMACPP) -m pip install $(PIP_FLAGS) xllamacpp==2026.10.11549
	@touch $@

clean:
	@rm -rf .venv .transformers .venv-llamacpp build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
