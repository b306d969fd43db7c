"""All experiments of the paper by one command.

    python -m bench.paper --list                              # what there is, and which of it has rows of these sources
    python -m bench.paper NAME ... [--root DATA]              # those, in full, into bench/results
    python -m bench.paper --all --quick [--out FOLDER]        # does every path run? rows and figures into a folder

An experiment whose rows are all of the sources that are there now is not run again, so that a command that was stopped
goes on with the next one; `--again` runs it all the same. Each is a module here, with its settings in its text; quick
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
from bench.provenance import RESULTS, ROOT, changed, rows_of


def done(experiment: Experiment, out: Path) -> bool:
    """Whether every pattern has rows, and all are of these sources."""
    paths = [sorted(out.glob(pattern)) for pattern in experiment.rows]
    rows = [row for found in paths for path in found for row in rows_of(path)]
    return all(paths) and all("sources" in row and not changed(row, out) for row in rows)


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
        again: also what has rows of these sources.
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
            print(f"{name:22} {experiment.what}{': done' if done(experiment, out) else ''}")
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
        if not again and done(experiment, out):
            print(f"{name}: has rows of these sources")
            continue
        started = time.monotonic()
        for command in experiment.quick if quick and experiment.quick else experiment.commands:
            print(f"+ python -m bench.paper.{command}", flush=True)
            words = [word.replace("ROOT", str(root)).replace("WORK", str(work)) for word in command.split()]
            marked = environment | (generated if experiment.data else {})
            ended = subprocess.run([sys.executable, "-m", f"bench.paper.{words[0]}", *words[1:]], env=marked)
            if ended.returncode:
                failed.append(name)
                break
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if quick:
        (out / "results.md").write_text(page(out, ".", QUICK), encoding="utf-8")
        print(out / "results.md")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main)
