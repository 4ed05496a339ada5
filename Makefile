PYTHON ?= python3
# The version that CI runs. A machine with GPUs takes its CUDA build; name another with `make demo TORCH=torch==...`.
TORCH ?= torch==2.13.0

.PHONY: install demo test lint docs bench clean

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet $(TORCH)
	.venv/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The main job on a real model: leaves demo/target, demo/standard, demo/run and demo/draft among others.
demo: install
	PATH="$(CURDIR)/.venv/bin:$$PATH" sh examples/demo.sh demo

test: install lint
	OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n 2

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: install
	.venv/bin/python docs/generate_cli.py
	.venv/bin/python docs/generate_alignment.py

bench: install
	.venv/bin/python benchmarks/codec.py --help

clean:
	rm -rf .venv build dist demo *.egg-info
