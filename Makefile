# SPDX-License-Identifier: Apache-2.0
.PHONY: help env demo test test-asan lint clean

help:
	@echo "make demo   build .venv, encode the bundled model and serve it on 127.0.0.1:8000"
	@echo "make test   build .venv and run all tests"
	@echo "make test-asan  kernel tests under the address and undefined-behaviour sanitizers"
	@echo "make env    build .venv alone"
	@echo "make lint   ruff and mypy"

env:
	@cpu_env/make.sh

demo: env
	@.venv/bin/python examples/demo.py

# Passive waiting: the servers under test and the tests share the cores, and spinning threads starve both.
test: env
	@OMP_WAIT_POLICY=passive .venv/bin/python -m pytest

# The package as a wheel lays it out, in links, in an empty folder.
define wheel_layout
rm -rf $(1) && mkdir -p $(1) && cp -rs "$(CURDIR)/vllm_dpa" $(1)/vllm_dpa && \
	for part in kernels profiling benchmarks; do cp -rs "$(CURDIR)/$$part" $(1)/vllm_dpa/$$part; done
endef

# The extension built with sanitizers, in the layout of a wheel, in front of the installed one. Leaks are
# Python's and torch's own.
SANITIZE = -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
test-asan: env
	@$(call wheel_layout,build/asan)
	@rm -f build/asan/vllm_dpa/kernels/cpu/_native*.so
	@CXXFLAGS="$(SANITIZE)" LDFLAGS="-fsanitize=address,undefined" .venv/bin/python setup.py -q build_ext \
		--build-lib build/asan --build-temp build/asan-temp
	@nm build/asan/vllm_dpa/kernels/cpu/_native*.so | grep -q __asan_report
	@cd build/asan && LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		../../.venv/bin/python -m pytest -q -p no:cacheprovider --rootdir ../.. ../../tests/kernels

# mypy does not follow the package-dir mapping of pyproject.toml, so it is shown the layout that a
# wheel has.
lint: env
	@.venv/bin/ruff check --output-format concise .
	@.venv/bin/ruff format --check .
	@$(call wheel_layout,build/lint)
	@cd build/lint && ../../.venv/bin/mypy --config-file ../../pyproject.toml -p vllm_dpa

clean:
	rm -rf .venv build demo
