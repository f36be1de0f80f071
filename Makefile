# make demo            create .venv, quantize the bundled model, generate text with it
# make test            create .venv, pass the tests
# make quantize MODEL=mixtral [OUT=folder] [ARGS="--high int8 --low-down 3"]
# make eval MODEL=checkpoints/tiny-apex [TASKS=apex_demo] [ARGS="--limit 50"]    accuracy of the engine beside its reference
# make gpu-check       on a machine with a CUDA device: kernels, their speed and the demo there, into docs/gpu-check.json
# make lint            ruff and mypy
#
# TORCH is the torch to install: the default is the version without a GPU that the tests use; on a machine with one,
# `make demo TORCH=torch` takes the newest CUDA build.

PYTHON ?= python3
TORCH ?= torch==2.13.0
MODEL ?= tiny
ARGS ?=
BIN := .venv/bin
READY := .venv/ready

.PHONY: demo test quantize eval lint docs gpu-check clean

demo: $(READY)
	$(BIN)/python -m apex_engine.generate

test: $(READY)
	$(BIN)/python -m pytest

quantize: $(READY)
	$(BIN)/python -m apex_engine.quantize '$(MODEL)' $(if $(OUT),-o '$(OUT)') $(ARGS)

eval: $(READY)
	$(BIN)/python -m apex_engine.eval '$(MODEL)' $(if $(TASKS),--tasks '$(TASKS)') $(if $(OUT),-o '$(OUT)') $(ARGS)

# mypy knows nothing of the mapping of the folders into one package: give it a tree of links that looks installed.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/types && mkdir -p build/types/apex_engine
	ln -s $(CURDIR)/apex_engine/* $(CURDIR)/kernels $(CURDIR)/quantize $(CURDIR)/eval build/types/apex_engine/
	cd build/types && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p apex_engine

docs: $(READY)
	$(BIN)/python -m benchmarks.demo_model -o docs/demo-model.md

# Needs torch, triton, transformers, safetensors and numpy of the PYTHON given, and no installation.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check -o docs/gpu-check.json

# torch first and alone: left to the other packages it may come as a CUDA build of several gigabytes.
$(READY): pyproject.toml constraints.txt kernels/cpu/native.c
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[quantize,jit,eval,dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
