# Needs make and Python with its venv module; everything else is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
JOBS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# One thread a process: two ranks share few cores.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-exhaustive check replay export-matrix model-matrix bench gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## train a Llama on two processes beside the serial model (ARGS="--help")
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/train_llama.py $(ARGS)

test: $(VENV)/dev.stamp ## run the tests (ARGS="-k llama" selects, JOBS=8 processes)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(VENV)/dev.stamp ## run the tests that need many processes or many models
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "slow and not exhaustive" $(ARGS)

test-exhaustive: $(VENV)/dev.stamp ## run the rows of matrices that CI leaves out, before a release
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m exhaustive $(ARGS)

check: $(VENV)/dev.stamp ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	@rm -rf build/types && mkdir -p build/types/autoshard
	@ln -s $(CURDIR)/autoshard/* $(CURDIR)/passes $(CURDIR)/runtime build/types/autoshard/
	MYPYPATH=build/types $(BIN)/mypy -p autoshard

replay: $(VENV)/dev.stamp ## a line of digests for each of many programs (ARGS="--against FILE")
	@$(BIN)/python tests/replay/replay.py $(ARGS)

export-matrix: $(VENV)/dev.stamp ## write docs/export_matrix.md: every family to every target (minutes)
	$(BIN)/python tests/helpers/export/export_matrix.py $(ARGS)

model-matrix: $(VENV)/dev.stamp ## a training step of every architecture on each mesh (hours; goes on)
	$(BIN)/python tests/helpers/architectures/model_matrix.py $(ARGS)

bench: $(VENV)/demo.stamp ## run the benchmarks (ARGS="planning training" selects)
	$(BIN)/python benchmarks/run_all.py $(ARGS)

gpu: $(VENV)/gpu.stamp ## what holds on this machine's GPUs, in one report (ARGS="--device cpu": without one)
	$(BIN)/python benchmarks/gpu_report.py $(ARGS)

clean: ## remove everything make created
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A machine that has torch (a GPU machine with its own CUDA build) lends it to the environment, by
# a .pth file, which unlike --system-site-packages also works where $(PYTHON) is in a venv itself.
# Elsewhere the pinned version is installed, first, so that nothing else chooses another one.
TORCH_FOLDER := import pathlib, torch; \
	assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11); \
	print(pathlib.Path(torch.__file__).parents[1])

$(VENV)/torch.stamp: constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@if folder=$$($(PYTHON) -c '$(TORCH_FOLDER)' 2>/dev/null); then \
		echo "Using the torch in $$folder"; \
		echo "$$folder" > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/torch.pth"; \
	else \
		echo "Installing $$(grep '^torch==' constraints.txt) (the long step)"; \
		$(PIP) "$$(grep '^torch==' constraints.txt)"; \
	fi
	@grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "Installing autoshard and what the demo needs."
	@$(PIP) -c $(VENV)/constraints.txt -e '.[demo]'
	@touch $@

# A GPU machine may have no network: where torch and what it brings are there, nothing is fetched.
$(VENV)/gpu.stamp: $(VENV)/torch.stamp pyproject.toml
	@$(BIN)/python -I -c 'import autoshard' 2>/dev/null || \
		$(PIP) --no-deps --no-build-isolation -e . || \
		$(PIP) -c $(VENV)/constraints.txt -e .
	@touch $@

# torch-tensorrt is only compared with. It declares an older TensorRT-RTX than the one we build with,
# and converts with ours, so it comes without what it declares.
$(VENV)/dev.stamp: $(VENV)/demo.stamp
	@echo "Installing what the tests need."
	@$(PIP) -c $(VENV)/constraints.txt -e '.[demo,dev]'
	@$(PIP) -c $(VENV)/constraints.txt --no-deps torch-tensorrt-rtx dllist || \
		echo "Its tests will be skipped: there is no torch-tensorrt-rtx for this machine."
	@touch $@
