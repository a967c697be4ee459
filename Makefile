# Everything runs in .venv; `make demo` and `make test` need only Python (3.11 or newer), make and git.
PYTHON ?= python3
BIN := .venv/bin
# Setuptools warns of every way to install a folder for editing.
PIP := PYTHONWARNINGS=ignore $(BIN)/python -m pip --quiet --disable-pip-version-check
# On Linux without an NVIDIA GPU PyTorch's much smaller wheels for CPUs, if their index can be reached.
CPU_INDEX := https://download.pytorch.org/whl/cpu
CPU_WHEELS := test $$(uname) = Linux && ! command -v nvidia-smi >/dev/null && \
	$(BIN)/python -c "from urllib.request import urlopen; urlopen('$(CPU_INDEX)/torch/', timeout=3)" 2>/dev/null && \
	echo --extra-index-url $(CPU_INDEX) || true
# Tests that run side by side must not fight for cores. Modules are compiled once, not by every process that a test starts.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
# Files in the order of collection: long ones first (tests/conftest.py).
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all test-fast quality docs bench hub clean

.venv/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing PyTorch, Transformers and hf_specgen into .venv; a few minutes"
	@$(PIP) install --upgrade pip
	@$(PIP) install --constraint constraints.txt $$($(CPU_WHEELS)) torch==2.13.0
	@$(PIP) install --constraint constraints.txt --editable '.[adapters,cli,published]'
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: .venv/installed
	@$(BIN)/hf-specgen demo

# All tests, of each at least one case, and of many cases one in eight: about four minutes on two cores.
test: .venv/installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) --quiet --part 8

# Every case, as in continuous integration: about ten minutes on two cores.
test-all: .venv/installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) --quiet

# Unit tests and doctests of the package: about a minute on two cores.
test-fast: .venv/installed-dev
	$(TEST_ENV) $(BIN)/python -m pytest $(WORKERS) --quiet tests/unit hf_specgen

quality: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/installed-dev
	$(PIP) install --editable '.[docs]'
	$(BIN)/zensical build --clean --strict

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks records
	$(BIN)/python -m benchmarks tables benchmarks/results --write benchmarks/README.md
	$(BIN)/python -m benchmarks tables benchmarks/results/projected --write docs/benchmarks.md

# The repository for `custom_generate=`, in dist/hub: its own files, the package, and the tag that it fetches.
hub:
	rm -rf dist/hub && mkdir -p dist && cp -r hub dist/hub && cp -r hf_specgen dist/hub/hf_specgen
	find dist/hub -name __pycache__ -prune -exec rm -r {} +
	sed -i 's|, "main"$$|, "$(TAG)"|' dist/hub/custom_generate/generate.py

clean:
	rm -rf .venv build dist *.egg-info
