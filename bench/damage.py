"""Files that are damaged and input that is wrong: is it refused with one message, or does it change nothing?

    python -m bench.damage                  # 1,000 damages of every file that a command reads
    python -m bench.damage --numbers        # 200 single wrong numbers in a store's arrays, with and without its cache
    python -m bench.damage --bad-input      # 2,000 flags, .npz contents, headers of stores and JSON files of runs

Each goes on where it was stopped. A damage is a bit that is flipped, a file cut off, deleted, swapped with another one,
replaced by something of the right name, or by that of another run or store. The command then reads it, and what came of
it is judged (`bench/judge.py`); a fault makes the exit status 1. Bad input may also be accepted: what it asks for is
then done (`accepted`).

Fixed: seed 0, a store of 90 nodes, 2 layers of width 16, 2 epochs of 3 steps, one thread; every 20th case is a process
of its own, the others are forks. A file that the user names (--weights, a profile, a cost model, a plan, an .npz file)
is not replaced by another whole one: that is what was asked for.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bench.judge import COMMANDS, FAULTS, Bench, Done, verdict
from bench.provenance import PACKAGE, RESULTS, current, write_rows
from megagraph.data.store import open_store

DAMAGES, NUMBERS, INPUTS, START_EVERY = 1000, 200, 2000, 20
STOPPED = 75  # by its time limit
UNKNOWN_SECONDS = {"profile": 30.0}  # of commands that only bad input is given to; others take 2
WEIGHTS = {
    "resume": 5,
    "auto": 4,
    "again": 2,
    "train": 5,
    "weights": 1,
    "predict": 5,
    "info": 3,
    "import": 1,
    "fit": 1,
    "search": 2,
    "costmodel": 1,
    "pareto": 1,
    "stages": 2,
    "timeline": 2,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A command, and what is done to its files before it.

    Args:
        name: of the command.
        arguments: of the command.
        prepare: changes the copy of the world, and says in a few words what was done.
        known: whether anything but the outcome on unchanged files is a fault.
    """

    name: str
    arguments: list[str]
    prepare: Callable[[Path], tuple[str, str]]  # -> kind of file, what was done
    known: bool = True


# ---- damages


def damage(bench: Bench, seed: int, index: int) -> Case:
    draw, world = random.Random(f"{seed} {index}"), bench.world
    names = [name for name in WEIGHTS if name in bench.expected]
    command = COMMANDS[draw.choices(names, [WEIGHTS[name] for name in names])[0]]

    def prepare(place: Path) -> tuple[str, str]:
        roots = [place / name for name in command.reads]
        plain = sorted(path for root in roots for path in (root, *root.rglob("*")) if path.is_file())
        folders = sorted(path for root in roots for path in root.rglob("*") if path.is_dir())
        kind = draw.choice(["flip"] * 4 + ["cut", "delete", "swap", "replace", "other", "folder"])
        path = draw.choice(folders if kind == "folder" and folders else plain)
        name = path.relative_to(place).as_posix()
        if name in command.given and kind in ("other", "folder"):
            kind = "replace"
        if kind in ("folder", "other") and draw.random() < 0.2 and path.is_dir():
            shutil.rmtree(path)
            return _kind(name), "delete the folder"
        if kind in ("other", "folder"):
            return _kind(name), other(path, world / "other" / name)
        return _kind(name), {"flip": flip, "cut": cut, "delete": delete, "replace": replace}.get(kind, swap)(
            draw, path, plain
        )

    return Case(command.name, command.arguments.split(), prepare)


def _kind(name: str) -> str:
    """A file without what is its own in its name."""
    return re.sub(r"partition-.*\.npy", "partition.npy", re.sub(r"step-\d+", "step", name))


def flip(draw: random.Random, path: Path, plain: list[Path]) -> str:
    content = bytearray(path.read_bytes()) or bytearray(1)
    at, bit = draw.randrange(len(content)), draw.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"flip bit {bit} of byte {at}"


def cut(draw: random.Random, path: Path, plain: list[Path]) -> str:
    content = path.read_bytes()
    size = draw.randrange(max(len(content), 1))
    path.write_bytes(content[:size])
    return f"cut to {size} of {len(content)} bytes"


def delete(draw: random.Random, path: Path, plain: list[Path]) -> str:
    path.unlink()
    return "delete"


def swap(draw: random.Random, path: Path, plain: list[Path]) -> str:
    two = draw.choice(plain)
    content = path.read_bytes()
    path.write_bytes(two.read_bytes())
    two.write_bytes(content)
    return f"swap with {two.name} in {two.parent.name}"


def other(path: Path, source: Path) -> str:
    """By that of another run or store; of what has a name of its own there, by the only one like it."""
    if not source.exists():
        found = sorted(source.parent.glob(f"*{source.suffix}"))
        if not found:
            return "nothing of the kind in the other one"
        source = found[0]
    if path.is_dir():
        shutil.rmtree(path)
        shutil.copytree(source, path)
    else:
        shutil.copy(source, path)
    return f"put {source.name} of another one"


def _archive() -> bytes:
    content = io.BytesIO()
    np.savez(content, labels=np.arange(3))
    return content.getvalue()


def _array() -> bytes:
    content = io.BytesIO()
    np.save(content, np.zeros(3))
    return content.getvalue()


FOREIGN = {
    "nothing": b"",
    "{}": b"{}",
    "[]": b"[]",
    "[{}]": b"[{}]",
    "null": b"null",
    "nan": b"NaN",
    "number": b"1" * 5000,
    "deep": b"[" * 100_000,
    "text": b"hello\n",
    "package.json": b'{"name": "site", "version": "1.0.0", "files": ["index.js"]}',
    "zeros": bytes(1000),
    "noise": random.Random(0).randbytes(1000),
    ".npy": _array(),
    ".npz": _archive(),
    "gzip of {}": gzip.compress(b"{}", mtime=0),
    "gzip of []": gzip.compress(b"[]", mtime=0),
    "safetensors": b"\x02\0\0\0\0\0\0\0{}",
}


def replace(draw: random.Random, path: Path, plain: list[Path]) -> str:
    """By something of the same name that this package did not write."""
    what = draw.choice([*FOREIGN, "folder", "link to nothing"])
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "link to nothing":
        path.symlink_to("nothing")
    else:
        path.write_bytes(FOREIGN[what])
    return f"replace by {what}"


# ---- wrong numbers


def number(bench: Bench, seed: int, index: int) -> Case:
    """One number of one array, as a program would that takes the file for its own."""
    draw = random.Random(f"{seed} number {index}")
    names = [name for name in ("train", "train", "info", "predict") if name in bench.expected]
    command = COMMANDS[draw.choice(names)]
    cached, checked = bool(index % 2), draw.random() < 0.5

    def prepare(place: Path) -> tuple[str, str]:
        store = place / "store"
        if not cached:
            shutil.rmtree(store / "cache")
        if cached and checked:
            open_store(store)  # what was right is remembered
        path = draw.choice(sorted(store.rglob("*.npy")))
        array = np.load(path, mmap_mode="r+").reshape(-1)
        if array.dtype.kind == "f":
            values = [np.nan, np.inf, -np.inf, 1e30, -1.0, 1e-30]
        else:
            limits = np.iinfo(array.dtype)
            values = [-1, 0, 1, 5, 9, 89, 90, 1 << 20, limits.max, limits.min]
        at = draw.randrange(len(array))
        before, array[at] = array[at], draw.choice([value for value in values if value != array[at]])
        array.flush()
        return f"{_kind(path.name)}, {'cache' if cached else 'no cache'}", f"{before} -> {array[at]} at {at}"

    return Case(command.name, command.arguments.split(), prepare)


# ---- the table


def cases(bench: Bench, mode: str, seed: int, count: int) -> Iterator[Case]:
    if mode == "bad_input":
        from bench.hostile import inputs

        yield from inputs(seed, count)
        return
    for index in range(count):
        yield (number if mode == "numbers" else damage)(bench, seed, index)


def look(bench: Bench, case: Case, start: bool) -> tuple[str, str, dict[str, Any]]:
    """Kind of file, verdict, and all about it."""
    with bench.copy("" if not case.known else case.name) as place:
        kind, done_to = case.prepare(place)
        done: Done = bench.run(
            place, case.arguments, bench.seconds.get(case.name, UNKNOWN_SECONDS.get(case.name, 2.0)), start
        )
        found = bench.judge(place, case.name, done) if case.known else verdict(done, lambda: True)
        if not case.known and (found == "same" or done.status == STOPPED):
            found = "accepted"
    about = {"kind": kind, "command": " ".join(case.arguments), "damage": done_to, "verdict": found, "start": start}
    about |= {"status": done.status, "seconds": round(done.seconds, 2), "err": done.err[-1500:]}
    return kind, found, about


def run(bench: Bench, todo: Iterator[Case], row: dict[str, Any], at_most: int | None, save: Callable[[], None]) -> None:
    """Judge the cases after the first ``row["cases"]``, and count them there."""
    before = row["cases"]
    counts = row["counts"] = {kind: Counter(found) for kind, found in row["counts"].items()}
    for index, case in enumerate(todo):
        if index < before:
            continue
        if at_most is not None and index >= before + at_most:
            break
        kind, found, about = look(bench, case, bench.start_seconds > 0 and index % START_EVERY == START_EVERY - 1)
        counts.setdefault(kind, Counter())[found] += 1
        row["cases"] = index + 1
        if found in FAULTS:
            row["faults"].append({"case": index, **about})
            print(json.dumps(row["faults"][-1], indent=1), flush=True)
        if row["cases"] % 20 == 0:
            save()
    save()


def main(
    numbers: bool = False,
    bad_input: bool = False,
    seed: int = 0,
    cases_in_all: int | None = None,
    at_most: int | None = None,
    keep: bool = True,
    short: bool = False,
) -> None:
    """Judge ``at_most`` of the cases that these sources have no rows of.

    Args:
        cases_in_all: in place of the number above.
        keep: rows in bench/results, and go on from those.
        short: fewer commands, all in forks.
    """
    mode = "numbers" if numbers else "bad_input" if bad_input else "damage"
    count = cases_in_all or {"damage": DAMAGES, "numbers": NUMBERS, "bad_input": INPUTS}[mode]
    name = mode if mode == "damage" else f"damage_{mode}"
    path = RESULTS / "cpu" / f"{name}.json"
    row: dict[str, Any] = {"mode": mode, "seed": seed, "unit": "cases", "cases": 0, "counts": {}, "faults": []}
    others: list[dict[str, Any]] = []
    if keep and path.exists():
        for found in filter(current, json.loads(path.read_text())):
            if found["seed"] == seed:
                row = {key: found[key] for key in row}
            else:
                others.append(found)

    def save() -> None:
        if keep:
            write_rows(name, [*others, row], folder="cpu", children=PACKAGE)

    with tempfile.TemporaryDirectory() as place:
        os.environ["MPLCONFIGDIR"] = os.environ.get("MPLCONFIGDIR", place)
        bench = Bench(Path(place), short=short)
        run(bench, cases(bench, mode, seed, count), row, at_most, save)
    total: Counter[str] = Counter()
    for kind, found in sorted(row["counts"].items()):
        print(f"{kind:<50} " + "  ".join(f"{verdict} {number}" for verdict, number in sorted(found.items())))
        total.update(found)
    print(f"{row['cases']} cases, seed {seed}: " + ", ".join(f"{name} {number}" for name, number in total.items()))
    if row["faults"]:
        raise SystemExit(1)


if __name__ == "__main__":
    tyro.cli(main)
