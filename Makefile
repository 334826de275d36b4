# make install   .venv with the package, editable, and everything the tests and examples need
# make demo      train a small GPT on four processes, and compare it with one process
# make demo-pipeline   train it as a pipeline of two stages, each on two processes
# make test      lint, types, layers, pages, tests
# make quick     the algebra, one model of a family, one test with processes of an ability: what to run between two edits
# make test-torch TORCH=2.14.1   the tests with another release of torch, in .venv-torch-2.14.1; PYTHON=python3.12 makes it
#                with another interpreter, and TESTS=tests/capture runs some of them
# make docs      the documentation as a site, in build/site

# A distribution's interpreter comes first: it is built with profile-guided optimisation, which a build from source lacks
# unless it is asked for; capture and planning take a fifth less time.
PYTHON ?= $(shell for python in /usr/bin/python3.11 python3.11 python3; do \
	$$python -c 'import ensurepip, venv' 2>/dev/null && command -v $$python && break; done)
BIN := .venv/bin/python -m
# The stamp names this checkout and the interpreter: an environment that came from elsewhere is completed, not trusted.
STAMP := .venv/.installed-$(shell pwd -P | cksum | cut -d' ' -f1)

# One environment for each release of torch that is tried.
TORCH_ENV := .venv-torch-$(TORCH)
TORCH_STAMP := $(TORCH_ENV)/.installed-$(shell pwd -P | cksum | cut -d' ' -f1)

.PHONY: install demo demo-pipeline test quick test-torch lint types format layers pages docs benchmark clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	.venv/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	rm -f .venv/.installed-*
	$(BIN) pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

demo: install
	OMP_NUM_THREADS=1 $(BIN) torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

demo-pipeline: install
	OMP_NUM_THREADS=1 $(BIN) torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt_pipeline.py

# Types take longest; what else is checked runs beside them.
lint: install
	$(MAKE) --jobs 2 --output-sync types format layers pages

types: install
	$(BIN) mypy

format: install
	$(BIN) ruff check .
	$(BIN) ruff format --check .

layers: install
	.venv/bin/python -c 'from importlinter.cli import lint_imports_command as lint; lint()'

pages: docs
	.venv/bin/python docs/compatibility.py --check
	.venv/bin/python docs/prices.py --check

# A link to nothing, or a page that the contents lack, is an error. The variable hides a notice of the theme's makers.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN) mkdocs build

# The tests of a file run in one process: what they share is made once.
test: lint
	# Processes that tests start would each compile all modules again where the environment forbids to write them.
	$(BIN) compileall -q autoshard tests
	$(BIN) pytest -n 2 --dist loadfile --durations 25

quick: install
	$(BIN) pytest -n 2 --dist loadfile -q @tests/quick.txt

test-torch:
	$(if $(TORCH),,$(error say which release: make test-torch TORCH=2.14.1))
	$(MAKE) $(TORCH_STAMP)
	$(TORCH_ENV)/bin/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'
	$(TORCH_ENV)/bin/python -m pytest -n 2 --dist loadfile $(TESTS)

# Torch brings the triton it was built with, and bounds setuptools. All else is as in the constraints, which name every
# package that is needed: pip need not search for versions, which takes it minutes where torch wants others.
$(TORCH_STAMP): pyproject.toml constraints.txt
	$(TORCH_ENV)/bin/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(TORCH_ENV)
	rm -f $(TORCH_ENV)/.installed-*
	$(TORCH_ENV)/bin/python -m pip install --quiet torch==$(TORCH) 'setuptools>=77'
	grep -v -E '^(torch|triton|setuptools)==' constraints.txt > $(TORCH_ENV)/others.txt
	$(TORCH_ENV)/bin/python -m pip install --quiet --no-deps --requirement $(TORCH_ENV)/others.txt --editable .
	touch $@

benchmark: install
	.venv/bin/python benchmarks/planning.py
	OMP_NUM_THREADS=1 $(BIN) torch.distributed.run --standalone --nproc-per-node 2 benchmarks/step.py

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
