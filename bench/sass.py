"""What a compiled kernel executes: its resources, and the instructions of its inner loops, from the cubin."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_\w+)\)")
_SPILLS = ("LDL", "STL")
_MOVES = ("LDG.", "STG", "LDS", "STS", "LDGSTS")
_WORK = ("MUFU.EX2", "HMMA", "HGMMA", "UTCHMMA", "UTCMMA", "STG")  # exponentials, products, planes that are written


@dataclass(frozen=True)
class Loop:
    """An innermost loop that does a kernel's work."""

    opcodes: Counter[str]

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with one of ``prefixes``; all without one."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefixes or ("",)))

    @property
    def spills(self) -> int:
        return self.count(*_SPILLS)

    @property
    def moved(self) -> int:
        """Bytes a lane moves between registers and L1 or shared memory."""
        return sum(n * _width(opcode) for opcode, n in self.opcodes.items() if opcode.startswith(_MOVES))

    def products(self, warps: int) -> tuple[int, int]:
        """Floating point operations of a program's mma.sync and wgmma."""
        sync = warp_group = 0
        for opcode, n in self.opcodes.items():
            if found := re.match(r"HMMA\.(\d\d?)(\d)(\d\d?)\.", opcode):  # 16816 or 1688
                sync += n * warps * 2 * math.prod(map(int, found.groups()))
            elif found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.", opcode):
                warp_group += n * warps // 4 * 2 * math.prod(map(int, found.groups()))
        return sync, warp_group


def _width(opcode: str) -> int:
    """Bytes a lane moves."""
    if opcode.startswith(("LDSM", "STSM")):
        return 4 * int(opcode[-1]) if opcode[-1] in "24" else 4
    found = re.search(r"\.[US]?(8|16|64|128)\b", opcode)
    return int(found[1]) // 8 if found else 4


def _run(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def read_cubin(cubin: bytes) -> tuple[dict[str, int], list[Loop]]:
    """Registers, stack bytes, spills and instructions outside of loops; innermost loops that do work, in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", path)
        text = _run(triton.knobs.nvidia.nvdisasm.path, "-c", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    opcodes, loops = _parse(text)
    resources = {"registers": int(found[1]), "stack": int(found[2])}
    resources["spills"] = sum(opcode.startswith(_SPILLS) for opcode in opcodes)
    found_loops = [Loop(Counter(opcodes[start:stop])) for start, stop in loops]
    resources["once"] = len(opcodes) - sum(loop.count() for loop in found_loops)
    return resources, found_loops


def _parse(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The opcode of every instruction, and the ranges of the innermost loops that do work."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    for line in text.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(opcodes)
        elif found := _INSTRUCTION.match(line):
            opcodes.append(found[1])
            branch = _BRANCH.search(line)
            if branch and branch[1] in labels:  # a jump backwards
                ranges.append((labels[branch[1]], len(opcodes)))
    # a loop that holds another loop is not innermost, whether or not the inner one does work
    innermost = [
        (start, stop)
        for start, stop in ranges
        if not any((a, b) != (start, stop) and start <= a and b <= stop for a, b in ranges)
    ]
    return opcodes, [(a, b) for a, b in innermost if any(op.startswith(_WORK) for op in opcodes[a:b])]
