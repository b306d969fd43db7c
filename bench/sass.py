"""What a compiled kernel executes: its resources, and the instructions of its inner loops, from the cubin."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import triton

_FILE = re.compile(r'//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")
_BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_\w+)\)")
_SPILLS = ("LDL", "STL")


@dataclass(frozen=True)
class Loop:
    """An innermost loop that computes exponentials."""

    function: str  # the jitted function that most of its instructions come from, of those asked for
    opcodes: Counter[str]

    def count(self, *prefixes: str) -> int:
        """Instructions whose opcode starts with one of ``prefixes``; all without one."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefixes or ("",)))

    @property
    def spills(self) -> int:
        return self.count(*_SPILLS)


@lru_cache
def _function_at(file: str) -> dict[int, str]:
    """Top-level function of every line of a source file."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {line: node.name for node in functions for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def _run(tool: str, *arguments: str | Path) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def read_cubin(cubin: bytes, passes: tuple[str, ...]) -> tuple[dict[str, int], list[Loop]]:
    """Registers, stack bytes and spill instructions of the kernel; its inner loops, each under the name of one of
    ``passes``, the functions that may own a loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", path)
        text = _run(triton.knobs.nvidia.nvdisasm.path, "-gi", "-c", path)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    instructions, loops = _parse(text)
    opcodes = Counter(opcode for opcode, _ in instructions)
    resources = {"registers": int(found[1]), "stack": int(found[2])}
    resources["spills"] = sum(n for opcode, n in opcodes.items() if opcode.startswith(_SPILLS))
    return resources, [_loop(instructions[start:stop], passes) for start, stop in loops]


def _loop(instructions: list[tuple[str, str]], passes: tuple[str, ...]) -> Loop:
    owners = Counter(function for _, function in instructions if function in passes)
    function = owners.most_common(1)[0][0] if owners else ""
    return Loop(function, Counter(opcode for opcode, _ in instructions))


def _parse(text: str) -> tuple[list[tuple[str, str]], list[tuple[int, int]]]:
    """(opcode, source function) of every instruction, and the ranges of the innermost loops with exponentials."""
    instructions: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    ranges: list[tuple[int, int]] = []
    function = ""
    for line in text.splitlines():
        if found := _FILE.search(line):
            function = _function_at(found[1]).get(int(found[2]), "")
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := _INSTRUCTION.match(line):
            instructions.append((found[1], function))
            branch = _BRANCH.search(line)
            if branch and branch[1] in labels:  # a jump backwards
                ranges.append((labels[branch[1]], len(instructions)))
    # a loop that holds another loop is not innermost, whether or not the inner one computes exponentials
    innermost = [
        (start, stop)
        for start, stop in ranges
        if not any((a, b) != (start, stop) and start <= a and b <= stop for a, b in ranges)
    ]
    exponentials = [any(op.startswith("MUFU.EX2") for op, _ in instructions[a:b]) for a, b in innermost]
    return instructions, [bounds for bounds, found in zip(innermost, exponentials, strict=True) if found]
