# Everything runs in .venv, which is made on the first use. PYTHON names the interpreter to make it with.
PYTHON ?= python3
# How many mutants make fuzz tries, and from which on; a million take one to two hours of one core.
MUTANTS ?= 100000
FROM ?= 0
# How many random models make match-models tries, and make campaigns too.
COUNT ?= 100000
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The torch that make compat tries, in an environment of its own.
TORCH ?= 2.6.0
COMPAT := .compat/$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-all lint dist bench match-quality match-models docs fixtures fuzz campaigns fleet code-mutants compat clean

# Tests start many interpreters: without compiled modules each takes twice as long.
unexport PYTHONDONTWRITEBYTECODE
# Two workers; tests of one xdist_group share what takes long to make.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## Train small wrapped models, break and fix their checkpoints, compare
	$(BIN)/python -m ckptfix.trainer.demo

quick: $(READY) ## Run the tests that show a mistake soonest; some 60 seconds on two cores
	$(PYTEST) -m "not campaign and not slow" $(ARGS)

test: $(READY) ## Run the tests; some four minutes
	$(PYTEST) -m "not campaign" $(ARGS)

test-all: $(READY) ## Run the tests and a slice of every campaign; some ten minutes
	$(PYTEST) $(ARGS)

lint: $(READY) ## Check style, types and words
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/plain_words.py

dist: $(READY) ## Build wheel and sdist, and try each in an environment of its own, without torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dist]'
	$(BIN)/python tests/release.py

bench: $(READY) ## Measure against cp, cmp, torch and others; needs several GB of disk
	$(BIN)/python -m pip install --quiet -c tests/constraints.txt -e '.[bench]'
	$(BIN)/python tests/benchmarks $(ARGS)

match-quality: $(READY) ## Count right and wrong keys of match and of simpler ways
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/match_quality.py $(ARGS)

match-models: $(READY) ## Count right, wrong and refused answers of match on COUNT random models (100000)
	PYTHONPATH=.:tests $(BIN)/python -m campaigns.match_answers --count $(COUNT)

docs: $(READY) ## Build the pages as a site with search, build/site/index.html
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[docs]'
	$(BIN)/python .github/site.py

fixtures: $(READY) ## Make the small files of fixtures/ anew
	$(BIN)/python fixtures/make.py

fuzz: $(READY) ## Run the property tests for longer, and a campaign of mutants
	CKPTFIX_LONG=1 $(PYTEST) tests/property $(ARGS)
	PYTHONPATH=.:tests $(BIN)/python -m property.campaign --from $(FROM) --mutants $(MUTANTS)

campaigns: $(READY) ## Break the writer in every way, and run every command on every file; long
	CKPTFIX_LONG=1 $(PYTEST) -rs tests/faults tests/audit tests/real tests/recorded tests/roundtrip tests/cli tests/unit $(ARGS)
	COUNT=$(COUNT) PYTHONPATH=tests $(BIN)/python -m campaigns

fleet: $(READY) ## Do 2,000 checkpoints as fleets that are killed, stopped and resumed; on Dask where it is
	PYTHONPATH=.:tests $(BIN)/python -m campaigns.fleet $(ARGS)

code-mutants: $(READY) ## Change the package's code in 200 ways, and list what no test notices; hours
	PYTHONPATH=tests $(BIN)/python -m campaigns.code_kills $(ARGS)

compat: ## Run loaders, contracts and round trips on another torch: make compat TORCH=2.6.0; downloads several GB
	test -x $(COMPAT)/bin/python || $(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[dev]'
	$(COMPAT)/bin/python -m pytest -n 2 --dist loadgroup -rs -m "not campaign" tests/unit/loaders tests/contract tests/roundtrip $(ARGS)

clean: ## Remove the environment and everything that was made
	rm -rf $(VENV) .demo .bench .hypothesis .mypy_cache .pytest_cache .ruff_cache .compat build dist
	find ckptfix tests fixtures -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml tests/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ckptfix needs Python 3.11 or later: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c tests/constraints.txt -e '.[dev]'
	touch $@
