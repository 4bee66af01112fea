# make train   trains the demo, MovieLens-100K on two ranks of this machine, from nothing installed
# make test    runs the tests            make test-full  runs the long matrices, too
# make check   lint, format and types    make bench      runs the benchmarks
# make sanitize   runs the C++ kernels under AddressSanitizer
# make ascend  compiles the Triton kernels for Ascend and runs them on this machine, in .venv-ascend
# make venv    installs into .venv       make clean      removes what was installed and built, never runs/
#
# PYTHON chooses the interpreter (3.10 to 3.13) the environment is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Inside the environment, so that removing .venv removes it too. Written last: an interrupted install is done again.
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
ASCEND := .venv-ascend
ASCEND_PIP := $(ASCEND)/bin/python -m pip --disable-pip-version-check
BENCHMARKS ?= quality prepare attention lookup balance hierarchical pipeline

.PHONY: train test test-full check sanitize ascend venv bench clean
.DEFAULT_GOAL := train

# The job's log is the product here, so it goes to stdout; TorchX writes it to stderr.
train: $(INSTALLED)
	$(BIN)/torchx run 2>&1

test: $(INSTALLED)
	$(BIN)/python -m pytest

test-full: $(INSTALLED)
	$(BIN)/python -m pytest -m ""

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p turbogr_plugin

sanitize: $(INSTALLED)
	$(BIN)/python -m tests.kernels.cpu.sanitized

ascend: $(ASCEND)/.installed
	$(ASCEND)/bin/python -m tests.ascend

bench: $(INSTALLED)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name; done

venv: $(INSTALLED)

# RecBole's wheel carries MovieLens-100K. Its dependencies are left out (numpy < 2 and ray among them): only its data
# file is read and it is never imported.
$(INSTALLED): pyproject.toml requirements-cpu.txt packaging/fbgemm-gpu-shim/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 14) else "Python 3.10 to 3.13 is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -r requirements-cpu.txt
	$(PIP) install --no-deps recbole==1.2.1
	touch $@

# triton-ascend 3.2.0 has wheels up to 3.11. A CUDA build of torch brings a Triton of its own, whose files triton-ascend
# would share.
$(ASCEND)/.installed: requirements-ascend.txt packaging/ascend-llvm.sh
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info[:2] in ((3, 10), (3, 11)) else "make ascend needs Python 3.10 or 3.11, for which triton-ascend is built; this is " + sys.version.split()[0] + ": make PYTHON=python3.11 ascend")'
	test -x $(ASCEND)/bin/python || $(PYTHON) -m venv $(ASCEND)
	$(ASCEND_PIP) install -r requirements-ascend.txt
	if $(ASCEND_PIP) show -q triton 2> /dev/null; then $(ASCEND_PIP) uninstall -q -y triton && \
	  $(ASCEND_PIP) install --force-reinstall --no-deps triton-ascend==3.2.0; fi
	packaging/ascend-llvm.sh $(ASCEND)/llvm
	touch $@

clean:
	rm -rf $(VENV) .venv-recbole $(ASCEND) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -rf packaging/*/build packaging/*/*.egg-info *.egg-info
	find turbogr_plugin tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
