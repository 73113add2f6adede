# Every target sets up what it needs and nothing twice: a stamp in .venv remembers each finished stage,
# and is older than the file that describes the stage only when that file has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help

TORCH := torch==2.13.0
VENV  := .venv
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip install --disable-pip-version-check --no-input
ARGS  ?=
# Options for pytest, such as TESTS="tests/plan -k prefix".
TESTS ?=
WORKERS ?= 2
CLIENTS_PORT ?= 8765
NODE_PACKAGES := ai@6.0.326 zod@4.6.7 @ai-sdk/openai@3.0.139 @ai-sdk/openai-compatible@2.0.87 @ai-sdk/anthropic@3.0.138
# Node too, because Claude Code and Qwen Code need 22 or newer.
AGENT_PACKAGES := node@22.23.3 @anthropic-ai/claude-code@2.1.327 @openai/codex@0.169.0 @qwen-code/qwen-code@0.24.4 opencode-ai@1.18.33
# How much `make fuzz` sends, and the seed of its cases (new in each run unless given).
SIZE ?= 100
SEED := $(or $(SEED),$(shell date +%s))
FUZZED := tests/contract tests/plan tests/engine/test_cycle_properties.py tests/models/test_config_changes.py tests/text tests/sources

.PHONY: help serve chat docs test prove test-agents test-clients test-gpu test-models fuzz lint format screenshots bench bench-peers setup setup-dev fetch clean

help: ## Show this list
	@echo "Millrace: an LLM serving engine. Each command does all the set-up it needs."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  make serve ARGS="--port 8123 --dtype float32"    options go in ARGS; .venv/bin/millrace serve --help lists them'

serve: setup ## Serve the default model, or ARGS="MODEL --port …"
	@$(BIN)/millrace serve $(ARGS)

chat: setup ## Talk to the default model in this terminal
	@$(BIN)/millrace chat $(ARGS)

test: lint fetch ## Check style, types, architecture, and run the tests with the real default model
	@tools/run_tests $(WORKERS) $(TESTS)

prove: setup-dev ## Run the tests five times on a clean clone: two with busy cores, one with 4 GiB less memory
	@$(BIN)/python tools/prove_suite.py --runs 2 --workers $(WORKERS)
	@$(BIN)/python tools/prove_suite.py --runs 2 --workers $(WORKERS) --busy
	@$(BIN)/python tools/prove_suite.py --runs 1 --workers $(WORKERS) --less-memory 4GiB

test-gpu: setup-dev ## Run the tests that need a GPU: kernels, whole models, graphs, determinism
	@$(BIN)/python -m pytest -m gpu -n auto --maxprocesses 12 --dist loadfile $(TESTS)
	@echo "The GPU agrees. Next: millrace bench gpu"

test-clients: setup-dev fetch ## Clients and agent frameworks against a running server, with packages of their own
	@test -x .venv-clients/bin/pytest || (python3 -m venv .venv-clients && .venv-clients/bin/python -m pip install -q -r requirements-clients.txt)
	@test -x .venv-clients-openai2/bin/pytest || (python3 -m venv .venv-clients-openai2 && .venv-clients-openai2/bin/python -m pip install -q -r requirements-clients-openai2.txt)
	@! command -v npm > /dev/null || test -d .venv-clients/node/node_modules/ai || \
		npm install --silent --no-save --prefix .venv-clients/node $(NODE_PACKAGES) || echo "npm install failed: the Vercel AI SDK is not tested"
	@$(BIN)/millrace serve --port $(CLIENTS_PORT) & server=$$!; trap "kill $$server" EXIT; \
		for _ in $$(seq 120); do curl -sf http://127.0.0.1:$(CLIENTS_PORT)/ready > /dev/null && break; sleep 1; done; \
		export MILLRACE_URL=http://127.0.0.1:$(CLIENTS_PORT) MILLRACE_NODE=$(CURDIR)/.venv-clients/node; \
		.venv-clients/bin/pytest -c /dev/null --confcutdir tests/clients -p no:cacheprovider tests/clients $(TESTS) && \
		.venv-clients-openai2/bin/pytest -c /dev/null --confcutdir tests/clients -p no:cacheprovider tests/clients $(TESTS)

test-agents: setup-dev .agents/.installed ## Claude Code, Codex CLI, opencode and Qwen Code (npm, pinned) against a real model; ARGS="codex --model M"
	@PYTHONPATH=tests $(BIN)/python -m agents.try_agents $(ARGS)

.agents/.installed: Makefile
	@command -v npm > /dev/null || { echo "make test-agents needs npm."; exit 1; }
	@npm install --silent --no-save --prefix .agents $(AGENT_PACKAGES) && touch $@

test-models: setup-dev ## Fetch the further real models (about 2 GB) and hold them to transformers
	@$(BIN)/millrace fetch --all
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -m real_models $(TESTS)
	@echo "The real models agree. Next: make serve ARGS=qwen2.5-coder-1.5b"

fuzz: setup-dev ## Fresh random cases from SEED: SIZE requests to each endpoint, 100 × SIZE to the real engine, property tests
	@echo "── fuzz: repeat this run with make fuzz SEED=$(SEED) SIZE=$(SIZE) TESTS=\"$(or $(TESTS),$(FUZZED))\""
	@FUZZ_SIZE=$(SIZE) FUZZ_REQUESTS=$(SIZE)00 FUZZ_SEED=$(SEED) PYTHONHASHSEED=$$(($(SEED) % 4294967296)) \
		OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --timeout=0 --hypothesis-seed=$(SEED) \
		$(or $(TESTS),$(FUZZED)) || { echo "Repeat one test with make fuzz SEED=$(SEED) SIZE=$(SIZE) TESTS=NAME." \
		"Keep the case: an @example or a line in the file's list of found cases."; exit 1; }

lint: setup-dev ## Check style, types and architecture only
	@echo "── style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo "── types"
	@$(BIN)/mypy
	@echo "── architecture"
	@$(BIN)/lint-imports --no-logo --no-cache

format: setup-dev ## Rewrite the sources in the house style
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: setup-dev ## Build the documentation as a site that needs no network: site/index.html
	@test -e $(VENV)/.requirements-docs || { echo "mkdocs could not be installed; see above."; exit 1; }
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "Open site/index.html; for its search: $(BIN)/python -m http.server -d site"

screenshots: setup-dev fetch ## Take the pictures of the documentation from a running server; ARGS="--model M --out DIR"
	@PYTHONPATH=$(CURDIR) $(BIN)/python tools/screenshots.py $(ARGS)

bench: setup ## Measure this machine: startup, TTFT, TPOT, throughput, prefix reuse, memory
	@$(BIN)/millrace bench $(ARGS)

bench-peers: setup ## Measure Millrace beside other engines, given or found installed (docs/peers.md)
	@$(BIN)/millrace bench peers $(ARGS)

fetch: setup ## Fetch the default model into the user's cache
	@$(BIN)/millrace fetch

clean: ## Remove .venv and everything built (fetched models stay in the user's cache)
	@rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find millrace tests -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "Clean. Next: make serve"

# ── set-up ────────────────────────────────────────────────────────────────────────────────────────────────────────
setup: $(VENV)/.kernels
setup-dev: $(VENV)/.kernels $(VENV)/.requirements-dev docs-tools

$(VENV)/.python:
	@python=$$($(CURDIR)/tools/find_python) || exit 1; \
	 echo "── set-up 1/5: $(VENV) with $$($$python --version)"; \
	 $$python -m venv $(VENV) && touch $@

# torch comes first and alone, so that the wheel for this machine (CPU or CUDA) is never replaced by another's wish.
$(VENV)/.torch: $(VENV)/.python
	@echo "── set-up 2/5: $(TORCH) (the largest download)"
	@$(PIP) $(TORCH) && touch $@

$(VENV)/.requirements: $(VENV)/.torch requirements.txt
	@echo "── set-up 3/5: the pinned requirements"
	@$(PIP) -r requirements.txt && touch $@

$(VENV)/.millrace: $(VENV)/.requirements pyproject.toml
	@echo "── set-up 4/5: millrace itself"
	@$(PIP) --quiet --no-deps --no-build-isolation -e . && touch $@

# Without a compiler this prints that torch's own operations are used, and is done.
$(VENV)/.kernels: $(VENV)/.millrace $(wildcard millrace/ops/cpp/*.[ch]* millrace/ops/cpp/*/*.[ch]*)
	@echo "── set-up 5/5: the kernels for this processor, compiled once"
	@$(BIN)/python -m millrace.ops.cpp.native && touch $@

$(VENV)/.requirements-dev: $(VENV)/.requirements requirements-dev.txt
	@echo "── set-up: the pinned requirements of the checks"
	@$(PIP) -r requirements-dev.txt && touch $@

# Checks go on without mkdocs: only the test that builds the site is skipped then.
.PHONY: docs-tools
docs-tools: $(VENV)/.requirements-dev
	@test $(VENV)/.requirements-docs -nt requirements-docs.txt || { \
	 echo "── set-up: the pinned requirements of the documentation"; \
	 $(PIP) -r requirements-docs.txt && touch $(VENV)/.requirements-docs || echo "The documentation cannot be built here."; }
