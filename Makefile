# Every user action; `make help` lists them. Each target calls one command-line program and nothing else.

PYTHON ?= python3
SPEC ?= build_engines/specs/smollm2-135m.yaml
TARGET ?=
DRY_RUN ?=
FORMAT ?=
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
METRICS_PORT ?= 8002
SLO ?= chat
HOST ?=
QUICK ?=
EXTRA ?=
SEED ?= 3
COUNT ?= 600

# Each is an option of `python -m loadtests`, which explains them with --help.
LOADTEST_OPTIONS = $(if $(filter-out file,$(origin SPEC)),--spec $(SPEC)) $(if $(QUICK),--quick) $(if $(UI),--ui) \
	$(foreach name,WORKLOAD USERS LADDER RATES ARRIVALS FIND TRANSPORT TRACE SPEED WORKERS COMPARE SEED,\
	$(if $($(name)),--$(shell echo $(name) | tr A-Z a-z) $($(name))))

BOOTSTRAP := @$(PYTHON) scripts/bootstrap.py
VENV := .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test check build-engines plan loadtest bench mask-oracle lock clean

help:  ## list the commands
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' Makefile | expand -t 24

setup:  ## .venv with the locked dependencies [PYTHON=python3.12 EXTRA=xgrammar|tracing]
	$(BOOTSTRAP) serve $(EXTRA)

serve: setup  ## build what is missing, then serve in the foreground [SPEC= HTTP_PORT= GRPC_PORT= METRICS_PORT=]
	@exec $(VENV) -m python_backend.server --spec $(SPEC) --exit-with-parent \
		--http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT) --metrics-port $(METRICS_PORT)

demo: setup  ## start a server, show a stream, constrained JSON, an adapter and log-probs, stop it
	@exec $(VENV) -m clients.demo

test:  ## all tests, on the real Triton
	$(BOOTSTRAP) dev
	@exec $(VENV) -m pytest -q $(TESTS)

check:  ## lint, types, import directions, file lengths, model repository
	$(BOOTSTRAP) dev
	@exec $(VENV) scripts/check.py

build-engines: setup  ## spec -> checkpoint -> engine -> model repository [SPEC= TARGET=cpu|trtllm|llmapi DRY_RUN=1]
	@exec $(VENV) -m build_engines build --spec $(SPEC) $(if $(TARGET),--target $(TARGET)) $(if $(DRY_RUN),--dry-run)

plan: setup  ## memory, KV cache, batch and card arithmetic of a spec [SPEC= FORMAT=json]
	@exec $(VENV) -m build_engines plan --spec $(SPEC) $(if $(FORMAT),--format $(FORMAT))

loadtest:  ## how many users hold within the SLO, with a report [SLO=chat HOST= WORKLOAD= USERS= FIND=max COMPARE= UI=1]
	$(BOOTSTRAP) loadtest
	@exec $(VENV) -m loadtests --slo $(SLO) $(if $(HOST),--host $(HOST)) $(LOADTEST_OPTIONS)

bench:  ## engine and server against peers, into benchmarks/latest.json [QUICK=1]
	$(BOOTSTRAP) loadtest bench
	@exec $(VENV) -m loadtests.bench $(if $(QUICK),--quick)

mask-oracle:  ## both constraint backends, jsonschema and re on the same structures [SEED=3 COUNT=600]
	$(BOOTSTRAP) dev
	@exec $(VENV) -m tests.tools.mask_oracle --seed $(SEED) --count $(COUNT)

lock:  ## resolve the dependencies of pyproject.toml anew (needs uv)
	@exec $(PYTHON) scripts/lock.py

clean:  ## remove everything that was built: .venv, engines, caches
	rm -rf .venv engines reports .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
