# Everything that the README names. Each target sets up what it needs; nothing outside this folder is changed
# but Debian packages (as root, only those that are missing).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKS := compiler/qdc/environments
DEBIAN := mmdebstrap docker.io iptables curl ca-certificates
DEBIAN_TEST := skopeo podman runc busybox-static docker-registry openssl
DEMO := demo

.PHONY: demo setup system test test-slow check schema results bench clean-demo

demo: setup system
	bash scripts/demo $(DEMO)

# One virtual environment from hash-pinned locks: what stages train in, and what the compiler and its checks need.
setup: $(VENV)/.ready

$(VENV)/.ready: $(LOCKS)/train.lock $(LOCKS)/dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else "qdc: the locks are for CPython 3.11; say make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-deps --require-hashes --only-binary :all: -r $(LOCKS)/train.lock
	$(BIN)/python -m pip install -q --no-deps --require-hashes --only-binary :all: -r $(LOCKS)/dev.lock
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

# Debian packages that build and run an image: only with root; without it, build and audit still work.
system:
	@bash scripts/system-packages $(DEBIAN)

test: setup
	$(MAKE) check
	$(BIN)/python -m pytest -m "not slow" tests

test-slow: setup system
	@bash scripts/system-packages $(DEBIAN_TEST)
	$(BIN)/python -m pytest -m slow tests

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy compiler/qdc
	$(BIN)/lint-imports

schema: setup
	$(BIN)/python scripts/schema

results: setup
	$(BIN)/python scripts/results

bench: setup
	$(BIN)/python benchmarks/frontend.py

clean-demo:
	rm -rf $(DEMO)
