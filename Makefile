# make demo | test | test-fast | test-long | test-oldest | test-nightly | lint | docs | wheels | bench | clean | venv
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
# The oldest torch that is supported, and the one under the newest of everything else.
OLDEST_TORCH ?= torch==2.5.1
NIGHTLY_TORCH ?= $(TORCH)
# Where a machine without a GPU gets torch from; by default see install_torch.
TORCH_INDEX ?=
OUTPUT ?= outputs/demo
DEMO_ARGS ?=
# Each process tests one model at a time on one thread, and all of a file, whose tests share models, runs and step profiles.
TEST_ARGS ?= -n auto --maxprocesses 4 --dist loadfile
BENCH_OUTPUT ?= outputs/bench
# For example: make bench BENCH_ARGS="--cases 3b-8x4096 --peers FOLDER"
BENCH_ARGS ?=

BIN := $(VENV)/bin
OLDEST := $(VENV)-oldest
NIGHTLY := $(VENV)-nightly
DOCS := $(VENV)-docs
WHEELS := $(VENV)-wheels
# For example: make test-nightly NIGHTLY_TESTS=plugin_tests/plan
NIGHTLY_TESTS ?=
# What an old torch, Accelerate, Transformers or PEFT could break: patches, activation, Trainer, loops, checkpoints, merges, the
# bits, a run without data.
OLDEST_TESTS := $(addprefix plugin_tests/integration/test_,activation.py import_orders.py launcher.py trainer_parity.py \
	trainer_evaluation_and_use.py loops_gradients_and_orders.py loops_prepare_and_clipping.py \
	loops_several_and_states.py checkpoints.py resume.py) plugin_tests/numerics/test_exactness.py \
	$(addprefix plugin_tests/integration/test_peft.py::test_,merge_and_unload_gives_the_plain_merged_model \
	unload_gives_the_base_model_back merged_weights_are_streamed_until_they_are_unmerged \
	merged_weights_are_unmerged_when_their_adapter_is_left) \
	plugin_tests/integration/test_estimate_command.py::test_json_holds_the_numbers_of_a_config_file
DEPENDENCIES := $(VENV)/.dependencies
INSTALLED := $(VENV)/.installed
KERNELS := $(wildcard megatrain_accelerate/kernels/csrc/*)

# The loss falls from about 7.6 to about 5.4 in 256k tokens.
CPU_DEMO_ARGS := --block_size 128 --max_text_mib 4 --per_device_train_batch_size 8 --max_steps 250 \
	--learning_rate 2e-3 --warmup_steps 20 --logging_steps 1 --eval_steps 50 --max_eval_blocks 64 \
	--dataloader_pin_memory false
GPU_DEMO_ARGS := --block_size 1024 --max_text_mib 8 --per_device_train_batch_size 16 --max_steps 60 \
	--learning_rate 3e-4 --warmup_steps 10 --logging_steps 2 --eval_steps 20 --max_eval_blocks 64
COMMON_DEMO_ARGS := --model_size auto --lr_scheduler_type cosine --adam_beta2 0.95 --weight_decay 0.1 --seed 42 \
	--eval_strategy steps --save_strategy no --report_to wandb --run_name demo
# The first steps of the CPU's demo: while the learning rate rises, it doesn't depend on the number of steps.
FIRST_STEPS_ARGS := $(CPU_DEMO_ARGS) $(COMMON_DEMO_ARGS) --model_size tiny --max_steps 20 --eval_strategy no --report_to none

.PHONY: demo test test-fast test-long test-oldest test-nightly lint docs wheels bench clean venv
.DELETE_ON_ERROR:

venv: $(INSTALLED)

export LIST_REPORT := import json, sys; \
	print(*(f"{at['metadata']['name']}=={at['metadata']['version']}" for at in json.load(sys.stdin)["install"]))

# PyPI's wheel of torch for Linux brings gigabytes of CUDA. Without a GPU the CPU build is taken: from wherever pip is
# set up to look, else from PyTorch's own index, else (it can't be reached) whatever pip finds: one package at a time, since
# all wheels of torch 2.5 with CUDA, packed and unpacked, take 8 GB of disk together.
# $(1): the environment, $(2): the version.
define install_torch
	@if nvidia-smi -L >/dev/null 2>&1; then \
		$(1)/bin/pip install "$(2)"; \
	elif [ -n "$(TORCH_INDEX)" ]; then \
		$(1)/bin/pip install --index-url "$(TORCH_INDEX)" "$(2)"; \
	else \
		echo "No GPU: installing a CPU build of torch"; \
		$(1)/bin/pip install "$(2)+cpu" 2>/dev/null \
		|| $(1)/bin/pip install --timeout 15 --retries 0 --index-url https://download.pytorch.org/whl/cpu "$(2)" \
		|| { $(1)/bin/pip install --quiet --dry-run --report $(1)/torch.json "$(2)" \
			&& $(1)/bin/python -c "$$LIST_REPORT" <$(1)/torch.json >$(1)/torch.txt \
			&& xargs -r -n 1 $(1)/bin/pip install --no-cache-dir --no-deps <$(1)/torch.txt; }; \
	fi
endef

$(DEPENDENCIES): requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(call install_torch,$(VENV),$(TORCH))
	$(BIN)/pip install -r requirements-dev.txt
	touch $@

# Without build isolation: an isolated build would fetch what is here already.
$(INSTALLED): $(DEPENDENCIES) pyproject.toml setup.py $(KERNELS)
	$(BIN)/pip install --no-build-isolation --no-deps -e .
	touch $@

demo: $(INSTALLED)
	@mkdir -p $(OUTPUT)
	@set -e; export WANDB_DIR=$(OUTPUT) WANDB_PROJECT=megatrain-demo TOKENIZERS_PARALLELISM=false; \
	first=$(OUTPUT); stock=--use_cpu; config=recipes/megatrain_cpu.yaml; arguments="$(CPU_DEMO_ARGS)"; \
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		first=$(OUTPUT)/first_steps; stock=; config=recipes/megatrain.yaml; arguments="$(GPU_DEMO_ARGS)"; \
	fi; \
	(set -x; $(BIN)/accelerate launch --config $$config recipes/train_causal_lm.py \
		--output_dir $(OUTPUT) $$arguments $(COMMON_DEMO_ARGS) $(DEMO_ARGS)); \
	echo "--- A sample of the saved model, by plain transformers:"; \
	MEGATRAIN_DISABLE=1 $(BIN)/python recipes/sample.py --model $(OUTPUT) --prompt "def read"; \
	echo "--- The first steps again, by the stock Trainer (of a small model if there is a GPU, with the plugin too):"; \
	if [ $$first != $(OUTPUT) ]; then \
		$(BIN)/accelerate launch --config $$config --mixed_precision no recipes/train_causal_lm.py \
			--output_dir $$first $(FIRST_STEPS_ARGS) $(DEMO_ARGS); \
	fi; \
	(set -x; MEGATRAIN_DISABLE=1 CUDA_VISIBLE_DEVICES=$${CUDA_VISIBLE_DEVICES:-0} $(BIN)/python recipes/train_causal_lm.py \
		--output_dir $(OUTPUT)/stock $(FIRST_STEPS_ARGS) $(DEMO_ARGS) $$stock); \
	echo "--- Report:"; \
	$(BIN)/python recipes/report.py $(OUTPUT) --require-falling-loss --losses $$first $(OUTPUT)/stock

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu and not long" $(TEST_ARGS)

test-long: $(INSTALLED)
	$(BIN)/python -m pytest -m "long and not gpu" $(TEST_ARGS)

# Environments of their own. Old packages warn of what newer Pythons and torch will drop; only our own tests turn
# warnings into errors.
$(OLDEST)/.installed: requirements-oldest.txt pyproject.toml setup.py $(KERNELS)
	$(PYTHON) -m venv $(OLDEST)
	$(call install_torch,$(OLDEST),$(OLDEST_TORCH))
	$(OLDEST)/bin/pip install -r requirements-oldest.txt
	$(OLDEST)/bin/pip install --no-build-isolation --no-deps -e .
	touch $@

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -m "not gpu and not long" -W ignore::FutureWarning -W ignore::DeprecationWarning \
		$(TEST_ARGS) $(OLDEST_TESTS)

# The environment is brought up to date by every run. torch is held at what was installed first: a newer one, asked for
# by any package, would be PyPI's build for CUDA.
test-nightly:
	$(PYTHON) -m venv $(NIGHTLY)
	$(call install_torch,$(NIGHTLY),$(NIGHTLY_TORCH))
	$(NIGHTLY)/bin/pip list --format freeze | grep '^torch==' > $(NIGHTLY)/held.txt
	sed 's/==.*//' requirements-dev.txt \
		| $(NIGHTLY)/bin/pip install --pre --upgrade --constraint $(NIGHTLY)/held.txt -r /dev/stdin
	$(NIGHTLY)/bin/pip install --no-build-isolation --no-deps -e .
	$(NIGHTLY)/bin/python -m pytest -m "not gpu" -W ignore::FutureWarning -W ignore::DeprecationWarning \
		$(TEST_ARGS) $(NIGHTLY_TESTS)

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest -m "not gpu and not slow and not long" $(TEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/size.py

$(DOCS)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -r requirements-docs.txt
	touch $@

docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict

$(WHEELS)/.installed: requirements-wheels.txt
	$(PYTHON) -m venv $(WHEELS)
	$(WHEELS)/bin/pip install -r requirements-wheels.txt
	touch $@

# The sdist, and from its content a wheel for each architecture: neither needs a compiler or a container. Zig builds its
# C++ library the first time, which takes minutes.
wheels: $(WHEELS)/.installed
	rm -rf dist
	$(WHEELS)/bin/python -m build --no-isolation --sdist
	for architecture in x86_64 aarch64; do \
		MEGATRAIN_WHEEL=$$architecture $(WHEELS)/bin/pip wheel --no-deps --no-build-isolation --no-cache-dir \
			--wheel-dir dist dist/*.tar.gz || exit; \
	done
	$(WHEELS)/bin/twine check --strict dist/*
	PATH=$(CURDIR)/$(WHEELS)/bin:$$PATH $(WHEELS)/bin/python .ci/packages.py

bench: $(INSTALLED)
	$(BIN)/python recipes/benchmarks/run.py --out $(BENCH_OUTPUT) $(BENCH_ARGS)

clean:
	rm -rf $(VENV) $(OLDEST) $(NIGHTLY) $(DOCS) $(WHEELS) build dist site outputs/demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	rm -f megatrain_accelerate/kernels/*.so
	find megatrain_accelerate plugin_tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
