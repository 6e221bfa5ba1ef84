# SPDX-License-Identifier: Apache-2.0
"""The native extension; everything else is in pyproject.toml.

One abi3 module that needs neither torch nor a binding library to build: it exports C functions that
take raw pointers, and kernels/cpu/native.py calls them through ctypes.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

FOLDER = "kernels/cpu/csrc"
X86 = platform.machine().lower() in ("x86_64", "amd64")
SOURCES = ["module", "isa", "pack", "allocate", "fused_moe", "descend", "read_stream", "portable"]
# Compiled for one instruction set each, and chosen at run time; see layout.h for what follows.
AVX512 = [
    "-Wno-maybe-uninitialized",  # of GCC 12, about its own intrinsics
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vbmi", "-mavx512vnni"),
    *("-mfma", "-mf16c", "-mprefer-vector-width=512"),
]
ISA_FLAGS = {
    "avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "avx512.cpp": AVX512,
    "amx.cpp": [*AVX512, "-mamx-tile", "-mamx-int8"],
}
if X86:
    SOURCES += ["avx2", "avx512", "amx"]


class BuildExtension(build_ext):
    """Says what is missing where the compiler is; never builds without the extension."""

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler._compile

        def with_isa_flags(obj: str, src: str, ext: str, cc: list, extra: list, pp: list) -> None:
            compile_one(obj, src, ext, cc, extra + ISA_FLAGS.get(Path(src).name, []), pp)

        self.compiler._compile = with_isa_flags
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
            [f"{FOLDER}/{name}.cpp" for name in SOURCES],
            depends=sorted(str(path) for path in Path(FOLDER).glob("*.h")),
            define_macros=[("Py_LIMITED_API", "0x030B0000")]
            + ([("VLLM_DPA_X86", None)] if X86 else []),
            py_limited_api=True,
            # No -ffast-math and no contraction: the allocator matches its reference bit for bit, and a
            # token's output is the same whichever instance of a kernel template computes it.
            extra_compile_args=[
                *("-O3", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-Wall"),
                "-ffp-contract=off",
            ],
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
