"""Small wrong changes of the code, one at a time: which test notices each?

    python -m bench.mutants                 # all of them
    python -m bench.mutants --quick         # by the tests of README's command, without the slow ones
    python -m bench.mutants --plans         # those of the planner and of the shares of a batch
    python -m bench.mutants --draw-seed 0   # the candidates of that seed, from which DRAWN was taken

Each goes on where it was stopped. The tests of the changed file come first, up to the first failure; a mutant that
survives them meets README's command, then the slow tests. All run on the unchanged files before, and must pass.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from bench.mutant_list import AREAS, MUTANTS, Mutant
from bench.mutant_plans import PLANS_AND_SHARES
from bench.provenance import PACKAGE, RESULTS, current, write_rows

ROOT = Path(__file__).parent.parent
SUITE = ("-n", "auto", "--dist", "loadgroup")
OF_SOURCES = (  # fail on every mutant
    "--deselect=tests/bench/test_suite.py::test_mutants_change_one_place_and_are_programs",
    "--deselect=tests/bench/test_rows.py",
)
GIVE_UP = 3600.0  # seconds; a mutant may hang


# ---- what tests say


@dataclass(frozen=True, slots=True)
class Said:
    failed: str | None  # the first test that failed; "collection", "hang"
    output: str


def run_tests(root: Path, tests: tuple[str, ...]) -> Said:
    """The tests on the files below ``root``, up to the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *OF_SOURCES, *tests]
    environment = os.environ | {"PYTHONPATH": str(root)}
    with subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=GIVE_UP)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pytest, its workers and their children
            return Said("hang", process.communicate()[0])
    if process.returncode == 0:
        return Said(None, output)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return Said("collection" if found is None else found[1], output)


def judge(root: Path, mutant: Mutant, quick: bool, sound: dict[tuple[str, ...], Said]) -> dict[str, Any]:
    """Which test fails first on a mutant."""
    started = time.perf_counter()
    row: dict[str, Any] = {"mutant": mutant.name, "file": mutant.file, "quick": quick, "killed_by": None, "suite": None}
    suites = [*(("file", (tests,)) for tests in mutant.tests), ("quick", SUITE), ("slow", (*SUITE, "-m", "slow"))]
    for suite, tests in suites[: -1 if quick else None]:
        if tests not in sound:
            sound[tests] = run_tests(root, tests)
        if sound[tests].failed is not None:
            raise SystemExit(f"these fail without a mutant: {sound[tests].failed}\n{sound[tests].output[-3000:]}")
        before = mutant.apply(root)
        try:
            said = run_tests(root, tests)
        finally:
            (root / mutant.file).write_text(before)
        if said.failed is not None:
            row |= {"killed_by": said.failed, "suite": suite}
            break
    return row | {"unit": "seconds", "seconds": round(time.perf_counter() - started, 1)}


# ---- candidates

_BOUNDS: dict[type, str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OPERATORS: dict[type, str] = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+"}
_CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "floor": "ceil", "ceil": "floor"}


def changes(node: ast.AST) -> Iterator[str]:
    """Texts that may stand in the place of a node."""
    match node:
        case ast.Compare(left, [operator], [right]) if type(operator) in _BOUNDS:
            yield f"{ast.unparse(left)} {_BOUNDS[type(operator)]} {ast.unparse(right)}"
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            yield f"({ast.unparse(left)}) {_OPERATORS[type(operator)]} ({ast.unparse(right)})"
        case ast.Constant(int() | float() as number) if not isinstance(number, bool):
            yield str(number + 1)
        case ast.BoolOp(operator, values):
            yield f"({(' or ' if isinstance(operator, ast.And) else ' and ').join(map(ast.unparse, values))})"
        case ast.UnaryOp(ast.Not() | ast.USub(), operand) | ast.IfExp(_, operand, _) | ast.IfExp(_, _, operand):
            yield ast.unparse(operand)
        case ast.Expr(ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Call(ast.Name(name) | ast.Attribute(_, name)) if name in _CALLS:
            yield ast.unparse(node).replace(name, _CALLS[name], 1)


def draw(seed: int, of_each_area: int = 8) -> Iterator[str]:
    """Functions of the core files in a random order, and one change of each."""
    rng = random.Random(seed)
    for folder, names in AREAS.items():
        pool = []
        for path in (ROOT / folder / f"{name}.py" for name in names):
            source = path.read_text()
            for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
                found = [
                    (node, new)
                    for statement in function.body
                    if not isinstance(statement, ast.Raise)
                    for node in ast.walk(statement)
                    if getattr(node, "lineno", 0) == getattr(node, "end_lineno", 1)
                    for new in changes(node)
                ]
                if found:
                    pool.append((path.relative_to(ROOT), function.name, found, source.splitlines()))
        rng.shuffle(pool)
        for path, name, found, lines in pool[:of_each_area]:
            node, new = rng.choice(found)
            line = lines[node.lineno - 1].encode()  # columns are bytes
            changed = line[: node.col_offset] + new.encode() + line[node.end_col_offset :]
            yield f"{path}:{node.lineno} {name}\n  - {line.decode().strip()}\n  + {changed.decode().strip()}"


def main(quick: bool = False, plans: bool = False, draw_seed: int | None = None, at_most: int | None = None) -> None:
    """Judge ``at_most`` of the mutants that these sources have no row of."""
    name, mutants = ("mutants-plans", PLANS_AND_SHARES) if plans else ("mutants", MUTANTS)
    if draw_seed is not None:
        print("\n".join(draw(draw_seed)))
        return
    path = RESULTS / "cpu" / f"{name}.json"
    rows = list(filter(current, json.loads(path.read_text()))) if path.exists() else []
    done = {(row["mutant"], row["file"]) for row in rows if row["quick"] == quick}
    sound: dict[tuple[str, ...], Said] = {}
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "copy"
        subprocess.run(["git", "clone", "-q", ROOT, root], check=True)
        for mutant in [mutant for mutant in mutants if (mutant.name, mutant.file) not in done][:at_most]:
            rows.append(judge(root, mutant, quick, sound))
            write_rows(name, rows, folder="cpu", children=(*PACKAGE, "tests"))
            print(f"{mutant.name} ({mutant.file}): {rows[-1]['killed_by'] or 'SURVIVES'}", flush=True)
    counts = Counter(row["suite"] for row in rows if row["quick"] == quick)
    found = {suite: counts[suite] for suite in ("file", "quick", "slow")}
    print(f"killed by the tests of their file, by other quick ones, by slow ones: {found}; {counts[None]} survive")


if __name__ == "__main__":
    tyro.cli(main)
