# SPDX-License-Identifier: Apache-2.0
"""Instructions of a compiled kernel, and of the loop that holds its matrix instructions."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import triton

_NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"

# By the pipe that executes them; control, memory and uniform instructions are neither.
_SASS_INTEGER = re.compile(
    r"(P?LOP3?|SHF|V?IADD3?|VIADDMNMX|PRMT|[IF]SETP|F?SEL|LEA|IABS|V?IMNMX|FMNMX|BMSK|SGXT|MOV|P2R|R2P"
    r"|POPC|FLO|VABSDIFF|HSETP?2)"
)
_SASS_FMA = re.compile(r"(FFMA2?|FADD2?|FMUL2?|HFMA2|HADD2|HMUL2|IMAD)")
_SASS_MMA = re.compile(r"(HMMA|HGMMA|UTCHMMA|IMMA|IGMMA|QGMMA|UTC\w*MMA)\b")
_GCN_FMA = re.compile(r"v_(pk_)?(fma|mul|add|sub|mac|fmac|cvt)\w*_(f16|bf16|f32)")


@dataclass(frozen=True)
class Loop:
    """Instructions of one iteration, per warp.

    Attributes:
        opcodes: count by full opcode.
        integer: logic, shifts, integer additions, moves, comparisons.
        fma: floating point arithmetic and integer multiplications.
        mma: matrix instructions.
    """

    opcodes: Counter[str]
    integer: int
    fma: int
    mma: int

    @property
    def issued(self) -> int:
        return self.opcodes.total()

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with one of ``prefixes``."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefixes))


@dataclass(frozen=True)
class Listing:
    """A kernel's code.

    Attributes:
        registers: per thread.
        spills: instructions that move spilled registers (on AMD: spilled registers).
        mma: the kind of matrix instruction; empty without one.
        hot: the loop with the most matrix instructions, or the largest one without any.
    """

    registers: int
    spills: int
    mma: str
    hot: Loop


def of_cubin(cubin: bytes) -> Listing:
    """Disassemble an NVIDIA binary with the tools that come with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = _output("nvdisasm", "-c", file.name)
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    if registers is None:
        raise ValueError("cuobjdump printed no register count")
    code, labels = _instructions(
        sass, re.compile(r"\s*/\*[0-9a-f]+\*/\s+(.*?);"), re.compile(r"\s*(\.L_x_\w+):")
    )
    opcodes = [_sass_opcode(line) for line in code]
    jumps = dict(_jumps(code, r"\bBRA\b.*?(\.L_x_\w+)", labels))
    loop = _hot(opcodes, jumps, _sass_loop)
    kinds = [opcode for opcode in opcodes if _SASS_MMA.match(opcode)]
    spills = sum(opcode.startswith(("LDL", "STL")) for opcode in opcodes)
    return Listing(int(registers[1]), spills, _commonest(kinds), loop)


def of_amdgcn(assembly: str) -> Listing:
    """Read AMD assembly as Triton prints it."""
    code, labels = _instructions(
        assembly, re.compile(r"\s+([a-z]\w*.*)"), re.compile(r"(\.LBB\w+):")
    )
    opcodes = [line.split()[0] for line in code]
    jumps = dict(_jumps(code, r"\bs_c?branch\w*\s+(\.LBB\w+)", labels))
    loop = _hot(opcodes, jumps, _gcn_loop)
    kinds = [opcode for opcode in opcodes if "mfma" in opcode]
    numbers = {
        name: int(value)
        for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", assembly)
    }
    return Listing(numbers["vgpr_count"], numbers["vgpr_spill_count"], _commonest(kinds), loop)


def _output(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [_NVIDIA_TOOLS / tool, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def _instructions(
    text: str, instruction: re.Pattern[str], label: re.Pattern[str]
) -> tuple[list[str], dict[str, int]]:
    """Instructions in order, and the index of the one that follows each label."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if found := label.match(line):
            labels[found[1]] = len(code)
        elif found := instruction.match(line):
            code.append(found[1].strip())
    return code, labels


def _jumps(code: list[str], pattern: str, labels: dict[str, int]) -> Iterable[tuple[int, int]]:
    for i, line in enumerate(code):
        if (found := re.search(pattern, line)) and found[1] in labels:
            yield i, labels[found[1]]


def _sass_opcode(line: str) -> str:
    return re.sub(r"^@!?U?P\w+\s+", "", line).split()[0]


def _commonest(kinds: list[str]) -> str:
    return Counter(kinds).most_common(1)[0][0] if kinds else ""


def _hot(opcodes: list[str], jumps: dict[int, int], classify: "type[Loop] | object") -> Loop:
    loops = [
        classify(Counter(opcodes[start : end + 1]))  # type: ignore[operator]
        for end, start in jumps.items()
        if start < end
    ]
    # Code moved out of line jumps back over whatever lies between, and a wait for a barrier is a loop,
    # too: of all that hold the most matrix instructions, the shortest is the real one.
    return max(
        loops, key=lambda loop: (loop.mma, -loop.issued), default=_sass_loop(Counter(opcodes))
    )


def _sass_loop(opcodes: Counter[str]) -> Loop:
    by_base: Counter[str] = Counter()
    for opcode, n in opcodes.items():
        by_base[opcode.split(".")[0]] += n
    return Loop(
        opcodes,
        integer=sum(n for base, n in by_base.items() if _SASS_INTEGER.fullmatch(base)),
        fma=sum(n for base, n in by_base.items() if _SASS_FMA.fullmatch(base)),
        mma=sum(n for base, n in by_base.items() if _SASS_MMA.match(base)),
    )


def _gcn_loop(opcodes: Counter[str]) -> Loop:
    vector = {o: n for o, n in opcodes.items() if o.startswith("v_") and "mfma" not in o}
    fma = sum(n for opcode, n in vector.items() if _GCN_FMA.match(opcode))
    mma = sum(n for opcode, n in opcodes.items() if "mfma" in opcode)
    return Loop(opcodes, integer=sum(vector.values()) - fma, fma=fma, mma=mma)
