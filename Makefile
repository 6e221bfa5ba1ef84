# SPDX-License-Identifier: Apache-2.0
.PHONY: help env demo test lint clean

help:
	@echo "make demo   build .venv, encode the bundled model and serve it on 127.0.0.1:8000"
	@echo "make test   build .venv and run all tests"
	@echo "make env    build .venv alone"
	@echo "make lint   ruff and mypy"

env:
	@cpu_env/make.sh

demo: env
	@.venv/bin/python examples/demo.py

# Passive waiting: the servers under test and the tests share the cores, and spinning threads starve both.
test: env
	@OMP_WAIT_POLICY=passive .venv/bin/python -m pytest

# mypy does not follow the package-dir mapping of pyproject.toml, so it is shown the layout that a
# wheel has.
lint: env
	@.venv/bin/ruff check --output-format concise .
	@.venv/bin/ruff format --check .
	@rm -rf build/lint && mkdir -p build/lint
	@cp -rs "$(CURDIR)/vllm_dpa" build/lint/vllm_dpa
	@cp -rs "$(CURDIR)/kernels" build/lint/vllm_dpa/kernels
	@cp -rs "$(CURDIR)/benchmarks" build/lint/vllm_dpa/benchmarks
	@cp -rs "$(CURDIR)/profiling" build/lint/vllm_dpa/profiling
	@cd build/lint && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p vllm_dpa

clean:
	rm -rf .venv build demo
