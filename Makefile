# Set-up happens by itself: every target below makes .venv first, once.
# PYTHON=/path/to/python chooses the interpreter; otherwise the first of 3.11, 3.12 and 3.13 that works.

JOBS := 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CANDIDATES := $(PYTHON) python3.11 python3.12 python3.13 python3
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

.PHONY: help setup verify smoke test test-all test-arm lint types perf docs doctor clean

help:
	@echo "make setup    create .venv and install: 7 GB on Linux"
	@echo "make doctor   show what this machine can compile and run"
	@echo "make verify   prove that what is compiled for this CPU is the model that PyTorch runs: 38 shallow cases,"
	@echo "              14 minutes on two Zen 4 cores; the report is reports/latest/verification_report.html"
	@echo "make smoke    tests that need no model, and one of each other kind: 2 minutes, for every commit"
	@echo "make test     the conformance suite on the CPU: half an hour"
	@echo "make test-all the same, with the expensive tests of every night"
	@echo "make test-arm CPU kernels, components and segment as AArch64 code, emulated elsewhere: an hour (docs/targets/arm.md)"
	@echo "make lint     ruff, and import-linter's contracts about imports"
	@echo "make types    mypy --strict, on harness and perf"
	@echo "make perf     benchmarks"
	@echo "make docs     the site of docs/ in build/site; checks links, anchors, the generated pages and the figures"
	@echo "make clean    remove .venv, caches and reports"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@python=; \
	for candidate in $(CANDIDATES); do \
		if "$$candidate" -c "$(USABLE)" >/dev/null 2>&1; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "error: no Python 3.11, 3.12 or 3.13 with venv was found: install one (Debian: apt install python3-venv)," \
			"or name it with make PYTHON=/path/to/python" >&2; \
		exit 2; \
	fi; \
	echo "Installing into $(VENV) with $$python (some GB the first time)"; \
	$(BIN)/python -c "$(USABLE)" >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
		--editable ".[verify,test,perf]"
	@touch $(STAMP)

# This CPU, the default strategy and the control; sam3-tvm verify without these runs every strategy.
verify: $(STAMP)
	$(BIN)/sam3-tvm verify --target llvm --strategy none --strategy real --jobs $(or $(filter-out 0,$(JOBS)),1)

doctor: $(STAMP)
	$(BIN)/sam3-tvm doctor

# GPU cases compile for minutes each and have jobs of their own: pytest -m cuda, pytest -m metal.
# Exporting and compiling use one CPU each, so two processes share the files; JOBS=0 runs everything in one.
# JUNIT=FILE writes the results as JUnit XML, too.
smoke: SELECTED := and (law or smoke)
test: SELECTED := and not wide
smoke test test-all: $(STAMP)
	$(BIN)/python -m pytest -m "not cuda and not metal $(SELECTED)" -n $(JOBS) --dist loadfile --no-loadscope-reorder \
		$(if $(JUNIT),--junitxml=$(JUNIT))

# Each process emulates a machine of its own.
test-arm: $(STAMP)
	$(BIN)/python -m conformance.aarch64
	$(BIN)/python -m pytest --aarch64 conformance/aarch64 conformance/schedules/cpu \
		-n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(JUNIT),--junitxml=$(JUNIT))

perf: $(STAMP)
	$(BIN)/python -m pytest perf

docs: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[docs]"
	$(BIN)/python -m pytest -q conformance/docs conformance/report/test_performance_report.py
	$(BIN)/mkdocs build --strict --quiet

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist reports *.egg-info .tox .hypothesis .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
