# Every target makes .venv first, when it is missing or the requirements have changed.

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
FUZZER := .venv/schemathesis/.installed

.PHONY: venv model fuzzer demo test docs served kernels check bench soak

venv: $(INSTALLED)

# torch goes first, by itself: whatever needs it then takes this build instead of choosing one.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt --editable '.[dev]'
	touch $@

# What sends the server requests of every kind, in an environment of its own: it needs a release of
# jsonschema-rs that the engine cannot do with.
fuzzer: $(FUZZER)

$(FUZZER): $(INSTALLED)
	test -x .venv/schemathesis/bin/python || $(PYTHON) -m venv .venv/schemathesis
	grep -v '^jsonschema-rs==' constraints.txt > .venv/schemathesis/constraints.txt
	.venv/schemathesis/bin/pip install --disable-pip-version-check \
		-c .venv/schemathesis/constraints.txt schemathesis==4.32.5
	touch $@

# The default model, into the user's cache: once, before tests that would all fetch it at once.
model: venv
	$(BIN)/structgen pull smollm2-135m

demo: venv
	$(BIN)/structgen demo

# One thread a worker: torch must not start a thread for every core in every worker.
test: venv model
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal --ignore tests/docs \
		--ignore tests/test_house.py -m 'not soak and not served'

# Field cases, and the suite of llm-comply, against server processes; and the demo.
served: venv model
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m served tests/cases tests/cli tests/server

# What the pages say: their programs are run, and print what they claim.
docs: venv model
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal tests/docs

# Triton kernels: a process in which they are interpreted, and one in which they are compiled.
kernels: venv
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal tests/kernels/interp
	STRUCTGEN_AOT=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) tests/kernels/aot

# What can be told without running anything: style, types, and the rules of the house.
check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n $(JOBS) tests/test_house.py

bench: venv model
	$(BIN)/python -m benchmarks

soak: venv model fuzzer
	$(BIN)/pytest -m soak -s --timeout=3600
