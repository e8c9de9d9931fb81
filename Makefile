# One command each: make run, make test. Everything lives in .venv; nothing else is touched.

PYTHON ?= python3
ARGS ?=
N ?= 300
RANKS ?= 30
SEED ?= 0
XLA ?= full
BIN := .venv/bin
STAMP := .venv/.installed

# Tests of several processes and of signals fail now and then on a machine that is busy otherwise. What
# failed is run once more, by itself; both runs stand in the output, and a second failure is one.
define pytest
$(1)/bin/python -m pytest -n 2 --dist loadgroup $(2) || { [ $$? -eq 1 ] && echo "once more, what failed:" && \
	$(1)/bin/python -m pytest --last-failed --last-failed-no-failures none $(2); }
endef

# The pages laid out as in the repository, and at the root those that only the site has.
define pages
rm -rf build/pages && mkdir -p build/pages
cp -pR README.md docs recipes docs/site/index.md docs/site/code.md docs/site/reference build/pages/
endef

.DEFAULT_GOAL := help
.PHONY: help env env-horovod env-xla data run test test-all test-horovod test-xla test-crash check docs linkcheck clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

env: $(STAMP) ## make .venv with all that is needed (again only when pyproject.toml or constraints.txt change)

env-horovod: ## make .venv-horovod, with Horovod built against torch, once, in the user's cache: minutes
	tools/environments/make.sh horovod $(PYTHON)

env-xla: ## make .venv-xla, with torch_xla, likewise: gigabytes; XLA=small is enough for a CPU
	tools/environments/make.sh $(if $(filter small,$(XLA)),xla-small,xla) $(PYTHON)

data: ## fetch the data sets that recipes need and that do not ship, into the user's cache; no root
	tools/data.sh

run: $(STAMP) ## train the digits recipe; more settings by ARGS="optimizer.lr=0.05"
	$(BIN)/python tools/run.py config=digits $(ARGS)

test: $(STAMP) ## run the tests but the slow ones
	$(call pytest,.venv,)

test-all: $(STAMP) ## run all tests
	$(call pytest,.venv,-m "")

test-horovod: env-horovod ## run the tests of backend horovod
	$(call pytest,.venv-horovod,tests/horovod)

test-xla: env-xla ## run the tests of backend xla, and some of the core on the torch that it needs
	$(call pytest,.venv-xla,tests/xla)
	$(call pytest,.venv-xla,$$(cat tests/xla/core.txt))

test-crash: $(STAMP) ## kill the command line N=300 times at random, RANKS=30 times on two processes (SEED=0), resume, compare
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash --kills $(N) --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.crash --kills $(RANKS) --seed $(SEED) --processes 2

check: $(STAMP) ## style, types, and who imports whom
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(STAMP) ## build the documentation as a site, build/site/index.html; any warning is an error
	$(pages)
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees -b html build/pages build/site
	@echo "build/site/index.html"

linkcheck: $(STAMP) ## try every link to elsewhere; needs a network
	$(pages)
	$(BIN)/sphinx-build -q -c docs -d build/doctrees -b linkcheck build/pages build/linkcheck

clean: ## remove .venv*, builds and caches; runs/ and what the user's cache has stay
	rm -rf .venv .venv-horovod .venv-xla build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "phaseloop needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
			"Choose another by: make env PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,docs]'
	@touch $(STAMP)
