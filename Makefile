# Everything runs in .venv, made on first use from constraints.txt; PYTHON picks another interpreter (>= 3.11).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := .venv-tools

# Tests start many processes, each of which would compile the package again if Python could not keep the bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test browser test-slow test-ray lint format docs dist bench bench-train bench-decode bench-gpu marian clean

# An environment made by hand, as README's first lines make it, is used as it is.
demo: $(if $(wildcard $(READY)),$(READY),$(if $(wildcard $(BIN)/ziggurat),,$(READY)))
	$(BIN)/ziggurat demo

# Three for two cores: some of the time tests wait, for other processes or for the disk.
test: $(READY) browser
	$(BIN)/python -m pytest -n 3 --dist worksteal

# Tests of pages skip where there is no Chromium; CI, as root, gets Debian's.
browser:
	@if [ "$$CI" = true ] && [ "$$(id -u)" = 0 ] && ! command -v chromium > /dev/null; then \
	  apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium; \
	fi

test-slow: $(VENV)/.ray
	$(BIN)/python -m pytest -m "slow or not slow"

# Jobs on a Ray cluster whose two nodes are processes of this machine.
test-ray: $(VENV)/.ray
	$(BIN)/python -m pytest -m slow tests/corpora/jobs/test_ray.py

lint: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

format: $(READY)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# build/site/index.html; a warning, a link that leads nowhere or anything fetched from another host is an error.
# Built from scratch each time, since Sphinx warns about a page only when it reads it.
docs: $(TOOLS)/.ready
	rm -rf build/site docs/api
	$(TOOLS)/bin/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs \
	  --doctree-dir build/site-trees --builder html . build/site
	$(TOOLS)/bin/python -m tools.site build/site

# dist/*.tar.gz, and the wheel made from it, ready for an index.
dist: $(TOOLS)/.ready
	rm -rf dist
	$(TOOLS)/bin/python -m build --no-isolation --outdir dist .
	$(TOOLS)/bin/python -m twine check --strict dist/*

bench: $(READY)
	$(BIN)/python -m benchmarks

# With peers whose environments $$BENCH and $$PEERS name (benchmarks/train_speed.py); without any, Ziggurat alone.
bench-train: $(READY)
	$(BIN)/python -m benchmarks.train_speed

# The same for decoding (benchmarks/decode_speed.py).
bench-decode: $(READY)
	$(BIN)/python -m benchmarks.decode_speed

# Marian 1.12.42 in its own environment, which slow tests, experiments and benchmarks look for there; 1.1 GB. Its
# wheel is for Python 3.11 alone.
MARIAN := $(or $(ZIGGURAT_MARIAN),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/ziggurat/marian)
MARIAN_PYTHON ?= python3.11
marian:
	$(MARIAN_PYTHON) -m venv $(MARIAN)
	$(MARIAN)/bin/python -m pip install --quiet --disable-pip-version-check pymarian==1.12.42
	$(MARIAN)/bin/pymarian --version

# One call under 9 minutes on a GPU; without one the same code on the pretend accelerator, with counts but no speeds.
bench-gpu: $(READY)
	$(BIN)/python -m benchmarks.gpu_speed

clean:
	rm -rf $(VENV) $(TOOLS) docs/api .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist ziggurat/model/fast/_compiled.so

# torch first: where an index offers CPU builds under the plain version, nothing of CUDA is fetched afterwards.
# TORCH_INDEX=https://download.pytorch.org/whl/cpu asks PyTorch's own index for the CPU build.
$(READY): constraints.txt pyproject.toml hatch_build.py ziggurat/model/fast/compiled.c
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# Ray, only for the slow tests that need it.
$(VENV)/.ray: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ray
	touch $@

# What `make docs` and `make dist` need, 120 MB; kept out of $(VENV), whose set-up everyone waits for. Sphinx reads the
# package's source, so neither the package nor PyTorch is installed here.
$(TOOLS)/.ready: constraints.txt pyproject.toml
	$(PYTHON) -m venv $(TOOLS)
	$(PYTHON) -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*extras["docs"], *extras["dist"], sep="\n")' > $(TOOLS)/requirements.txt
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --requirement $(TOOLS)/requirements.txt
	touch $@
