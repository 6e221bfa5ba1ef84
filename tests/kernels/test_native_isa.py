# SPDX-License-Identifier: Apache-2.0
"""Which instruction set is chosen, and that the files built for one leak nothing to the others."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_dpa.kernels.cpu import native
from vllm_dpa.kernels.cpu.packed import HUGE_PAGE, zeros

CSRC = Path(__file__).parents[2] / "kernels/cpu/csrc"


def flags_of_this_processor() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def test_best_available_one_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    flags = flags_of_this_processor()
    wanted = "portable"
    if {"avx2", "fma", "f16c"} <= flags:
        wanted = "avx2"
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vnni"} <= flags:
        wanted = "avx512"
    if wanted == "avx512" and {"amx_tile", "amx_int8"} <= flags:
        wanted = "amx"
    assert native.active_isa() == wanted
    assert native.available_isas()[-1] == "portable"


@pytest.mark.parametrize("isa", native.available_isas())
def test_variable_chooses_one(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    assert native.active_isa() == isa


def test_unknown_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, "mmx")
    with pytest.raises(RuntimeError, match="VLLM_DPA_CPU_ISA=mmx is not available"):
        native.active_isa()


def test_x86_headers_are_in_x86_files_alone() -> None:
    users = {path.name for path in CSRC.iterdir() if "immintrin.h" in path.read_text()}
    assert users == {"avx2.cpp", "avx512.cpp", "avx512_tile.h", "amx.cpp"}
    includers = {path.name for path in CSRC.iterdir() if '"avx512_tile.h"' in path.read_text()}
    assert includers == {"avx512.cpp", "amx.cpp"}


AVX512 = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vbmi -mavx512vnni -mfma"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("avx2.cpp", "-mavx2 -mfma -mf16c"),
        ("avx512.cpp", AVX512),
        ("amx.cpp", f"{AVX512} -mamx-tile -mamx-int8"),
    ],
)
def test_isa_files_share_no_inline_function(file: str, flags: str, tmp_path: Path) -> None:
    """A weak symbol built with AVX could be the linker's choice for every other file."""
    if "avx2" not in native.available_isas():
        pytest.skip("not an x86 processor with AVX2")
    out = tmp_path / "object.o"
    command = ["g++", "-std=c++17", "-O1", "-DVLLM_DPA_X86", *flags.split(), "-c", str(CSRC / file)]
    subprocess.run([*command, "-o", str(out)], check=True, capture_output=True)
    symbols = subprocess.run(["nm", str(out)], check=True, capture_output=True, text=True).stdout
    weak = [line for line in symbols.splitlines() if " W " in line or " V " in line]
    assert weak == []


def test_openmp_runtime_is_torchs_own() -> None:
    """Two runtimes would mean two pools of threads on the same cores."""
    program = (
        "from vllm_dpa.kernels.cpu import native; native.library();"
        "print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    runtimes = {
        line.split()[-1] for line in maps.splitlines() if re.search(r"lib(gomp|iomp|omp)", line)
    }
    assert len(runtimes) == 1
    assert Path(torch.__file__).parent in Path(runtimes.pop()).parents


@pytest.mark.parametrize("size", [(3, 100), (1, HUGE_PAGE), (3, HUGE_PAGE + 1)])
def test_zeros_are_zero_writable_and_kept_alive(size: tuple[int, int]) -> None:
    tensor = zeros(size)
    assert tensor.shape == size
    assert not tensor.any()
    assert tensor.data_ptr() % 64 == 0
    part = tensor[-1]
    del tensor
    part[-1] = 7
    assert int(part.sum()) == 7
