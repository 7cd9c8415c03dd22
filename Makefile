# Every command of this repository. The environments behind them are made on first use, below .cache/envs.

PYTHON ?= python3
# Evaluated in each recipe: only a target that needs the environment pays for making it.
DEV = py=$$($(PYTHON) tools/envs.py dev --print) && "$$py"
# Two processes, a file of tests in one of them: tests of a file share servers, environments and builds. In the order
# of tests/conftest.py: long files first.
SPREAD = -n 2 --dist loadfile --no-loadscope-reorder
# One thread each: with one per core, torch's threads in both spend their time waiting for each other.
test test-all: export OMP_NUM_THREADS = 1
# An interpreter with SGLang's CUDA build, this package and pytest; without one, an environment of several gigabytes.
SGLANG_PYTHON ?= $$($(PYTHON) tools/envs.py gpu --print)
CPP_FILES = git ls-files -z --cached --others --exclude-standard '*.cu' '*.cuh' '*.h' '*.cc'

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu test-e2e-gpu lint types build wheel-cuda \
	bench-host bench-startup bench-serving clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: ## Serve a tiny NVFP4 model with SGLang and this package, and check its answers
	$(PYTHON) tools/demo.py

test: ## What needs no GPU, on the newest supported SGLang
	$(DEV) -m pytest $(SPREAD) -m "not matrix and not slow and not gpu"

test-all: ## The same, every supported SGLang release, and every mutation of the kernels
	$(DEV) -m pytest $(SPREAD) -m "not gpu"

test-gpu: ## What needs an NVIDIA GPU; writes results/gpu_tests_CARD.json
	$(DEV) -m pytest -m "gpu and not e2e" --gpu-results results

test-e2e-gpu: ## Real servers on an NVIDIA GPU under load; writes results/e2e_tests_CARD.json
	py=$(SGLANG_PYTHON) && "$$py" -m pytest -m e2e --gpu-results results tests/e2e_gpu

test-gpu-sanitize: ## The smallest of these under compute-sanitizer: memcheck, then racecheck
	$(DEV) -c pass && for tool in memcheck racecheck; do \
		compute-sanitizer --tool $$tool --print-level error --error-exitcode 9 "$$py" -m pytest -m sanitize tests/kernels/gpu || exit; done

lint: ## Style of Python and C++, and the house rules
	$(DEV) -m ruff check
	$(DEV) -m ruff format --check
	$(DEV) tools/check_tree.py
	$(DEV) -c pass && $(CPP_FILES) | xargs -0 -r "$$(dirname "$$py")/clang-format" --dry-run --Werror

types: ## mypy
	$(DEV) -m mypy

build: ## The sdist and the wheel for every platform, in dist/
	$(DEV) -m build

wheel-cuda: ## The wheel with compiled kernels for this kind of processor, in dist/
	SM120_WHEEL=cuda; export SM120_WHEEL; $(DEV) -m build

bench-host: ## What the hooks cost per process and per call
	$(DEV) benchmarks/host.py

bench-serving: ## FP4 backends of SGLang on an NVIDIA GPU, end to end; writes results/serving_dense_CARD.json
	py=$(SGLANG_PYTHON) && "$$py" -m benchmarks.serving

bench-startup: ## What the boot file costs at the start of an interpreter
	$(DEV) benchmarks/startup.py

clean: ## Remove what builds and tools left; environments stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.cache -prune -o -name __pycache__ -type d -exec rm -rf {} +
