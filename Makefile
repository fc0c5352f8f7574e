VENV ?= .venv
LINT_VENV ?= .venv-lint
PY := $(VENV)/bin/python
# Tests run two at a time; a thread pool in each would only make them wait for one another.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2

.PHONY: demo test test-nxd test-vllm lint clean

demo: $(VENV)/.installed-parity  ## write, run and prove a small synthetic Kimi-K2
	rm -rf build/demo build/golden
	$(VENV)/bin/kimi-k2 make-checkpoint build/demo --model kimi-k2-instruct-0905
	$(VENV)/bin/kimi-k2 generate build/demo --prompt Hello --max-new-tokens 16
	$(VENV)/bin/kimi-k2 parity capture build/demo build/golden --greedy
	$(VENV)/bin/kimi-k2 parity compare build/golden build/demo

test: $(VENV)/.installed-test  ## every test this machine can run
	@echo "test: 4,000 tests, 8 minutes on two cores, up to 3 GB of memory; a bar shows the share that is done"
	$(PYTEST)

# One SDK's tests against real NxD, for an environment where NxD is importable (docs/trainium.md).
NXD_PYTHON ?= python
NXD_1 := application commands registration options compiler_args readme_steps lowering compile_images
NXD_2 := logits decode_layers every_preset sharding_nxd parity_tool
NXD_TESTS := $(patsubst test/nxd/test_%.py,%,$(wildcard test/nxd/test_*.py))
NXD_3 := bf16_graphs drawn every_position long_positions mutations
NXD_4 := $(filter-out $(NXD_1) $(NXD_2) $(NXD_3),$(NXD_TESTS))
PART ?= 1

test-nxd:  ## PART=1, 2, 3 or 4 of the tests that need NxD importable
	OMP_NUM_THREADS=1 $(NXD_PYTHON) -m pytest -q -n 2 $(patsubst %,test/nxd/test_%.py,$(NXD_$(PART)))

# For an environment where vLLM is importable (docs/engines.md).
VLLM_PYTHON ?= python

test-vllm:  ## the tests that need vLLM importable
	OMP_NUM_THREADS=1 $(VLLM_PYTHON) -m pytest -q -rs test/serving

# In an environment of its own: what these bring must not be what a test finds.
lint: LINT := $(LINT_VENV)/bin
lint: $(LINT_VENV)/.installed-dev  ## style, types, imports
	$(LINT)/python -m ruff check
	$(LINT)/python -m ruff format --check
	$(LINT)/python -m mypy
	$(LINT)/lint-imports
	git ls-files "*.cu" "*.cuh" "test/kernels/*.h" | xargs $(LINT)/clang-format --dry-run -Werror

$(VENV)/.installed-% $(LINT_VENV)/.installed-%: pyproject.toml requirements.txt scripts/install.sh
	VENV=$(@D) scripts/install.sh $*
	touch $@

clean:
	rm -rf $(VENV) $(LINT_VENV) .pytest_cache .mypy_cache .ruff_cache
