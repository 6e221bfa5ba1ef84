# SPDX-License-Identifier: Apache-2.0
"""The native extension; everything else is in pyproject.toml.

One abi3 module that needs neither torch nor a binding library to build: it exports C functions that
take raw pointers, and kernels/cpu/native.py calls them through ctypes.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

SOURCES = ["kernels/cpu/csrc/module.cpp", "kernels/cpu/csrc/knapsack.cpp"]


class BuildExtension(build_ext):
    """Says what is missing where the compiler is; never builds without the extension."""

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except (CompileError, ExecError, LinkError) as error:
            sys.exit(
                f"vllm-dpa: the native CPU kernels could not be built ({error}). A C++17 compiler "
                "with OpenMP is needed (g++ or clang++, on Debian: apt-get install g++); set CXX "
                "to choose another one"
            )


setup(
    ext_modules=[
        Extension(
            "vllm_dpa.kernels.cpu._native",
            SOURCES,
            depends=["kernels/cpu/csrc/kernels.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            # No -ffast-math: the allocator matches its reference bit for bit.
            extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-Wall"],
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
