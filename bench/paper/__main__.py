"""All experiments of the paper by one command.

    python -m bench.paper --list                              # what there is, and which of it has rows of these sources
    python -m bench.paper NAME ... [--root DATA]              # those, in full, into bench/results
    python -m bench.paper --all --quick [--out FOLDER]        # does every path run? rows and figures into a folder

An experiment that has ended well, with rows as full or quick as asked and all of the sources that are there now, is not
run again, so that a command that was stopped goes on with the next one; `--again` runs it all the same, and what it
would take up where it was stopped from the start, but for trainings of `accuracy`. What has ended is known by the
SHA-256 of its rows in FOLDER/finished/NAME.sha256. Each is a module here, with its settings in its text; quick
ones are small (`sized` in `bench/provenance.py`), their rows say so (`quick`), and they never go to bench/results;
FOLDER/results.md shows them. That of the full rows is docs/results.md (`python -m bench.stale --write`).
Without `--root`, quick ones take generated graphs of the same shape and say that, too (`generated`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import tyro

from bench.paper import raw_files
from bench.paper.experiments import EXPERIMENTS, Experiment
from bench.paper.page import QUICK, page
from bench.provenance import RESULTS, ROOT, changed, rows_of, sha256


def done(name: str, out: Path, quick: bool, generated: bool) -> bool:
    """Whether it has ended well, and its rows are those of then, all of these sources and marked so."""
    finished, files = _finished(name, out), _files(EXPERIMENTS[name], out)
    if not finished.exists() or finished.read_text() != _listed(files, out):
        return False
    rows = [row for path in files for row in rows_of(path)]
    marks = {(row.get("quick", False), row.get("generated", False)) for row in rows}
    return marks == {(quick, generated)} and all("sources" in row and not changed(row, out) for row in rows)


def finish(name: str, out: Path) -> None:
    """Note that it has ended well, where every pattern has rows."""
    experiment = EXPERIMENTS[name]
    if all(any(out.glob(pattern)) for pattern in experiment.rows):
        _finished(name, out).parent.mkdir(exist_ok=True)
        _finished(name, out).write_text(_listed(_files(experiment, out), out))


def _finished(name: str, out: Path) -> Path:
    return out / "finished" / f"{name}.sha256"


def _files(experiment: Experiment, out: Path) -> list[Path]:
    return sorted(path for pattern in experiment.rows for path in out.glob(pattern))


def _listed(files: list[Path], out: Path) -> str:
    return "".join(f"{sha256(path)}  {path.relative_to(out).as_posix()}\n" for path in files)


def main(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    every: Annotated[bool, tyro.conf.arg(name="all")] = False,
    show: Annotated[bool, tyro.conf.arg(name="list")] = False,
    quick: bool = False,
    again: bool = False,
    root: Path | None = None,
    out: Path | None = None,
) -> None:
    """Run experiments.

    Args:
        names: of the list.
        every: all of them.
        show: the list.
        quick: small settings, to see every path run.
        again: also what is done.
        root: folder of the raw data sets.
        out: folder of rows and figures; bench/results, or build/paper-quick with ``quick``.
    """
    out = (out or (ROOT / "build" / "paper-quick" if quick else RESULTS)).absolute()
    if unknown := sorted(set(names) - set(EXPERIMENTS)):
        raise SystemExit(f"expected experiments of {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}")
    if quick and out == RESULTS:
        raise SystemExit(f"expected a folder of its own for quick rows, got {out}; name another with --out")
    chosen = {name: EXPERIMENTS[name] for name in EXPERIMENTS if every or name in names or (show and not names)}
    if show:
        for name, experiment in chosen.items():
            is_done = done(name, out, quick, quick and root is None and experiment.data)
            print(f"{name:22} {experiment.what}{': done' if is_done else ''}")
        return
    if not chosen:
        raise SystemExit("expected names of experiments, or --all; --list shows them")
    environment = os.environ | {"MEGAGRAPH_BENCH_ROWS": str(out)} | ({"MEGAGRAPH_BENCH_QUICK": "1"} if quick else {})
    generated: dict[str, str] = {}
    if root is None and any(experiment.data for experiment in chosen.values()):
        if not quick:
            raise SystemExit("expected --root, the folder of the raw data sets")
        root = out / "graphs"
        raw_files.write(root)
        generated = {"MEGAGRAPH_BENCH_GENERATED": "1"}
    failed, work = [], out if quick else ROOT / "build"
    for name, experiment in chosen.items():
        marked = generated if experiment.data else {}
        if not again and done(name, out, quick, bool(marked)):
            print(f"{name}: has rows of these sources")
            continue
        started = time.monotonic()
        for command in experiment.quick if quick and experiment.quick else experiment.commands:
            print(f"+ python -m bench.paper.{command}", flush=True)
            given = command.replace("AGAIN", "--again" if again else "").split()
            words = [word.replace("ROOT", str(root)).replace("WORK", str(work)) for word in given]
            run = [sys.executable, "-m", f"bench.paper.{words[0]}", *words[1:]]
            if subprocess.run(run, env=environment | marked).returncode:
                failed.append(name)
                break
        else:
            finish(name, out)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if quick:
        (out / "results.md").write_text(page(out, ".", QUICK), encoding="utf-8")
        print(out / "results.md")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
