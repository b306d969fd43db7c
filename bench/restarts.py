"""Runs whose ranks are killed or told to leave: does one torchrun command bring each to the end it would have had?

    python -m bench.restarts                # 60 kills: every phase, six layouts, --workers 0 and 2
    python -m bench.restarts --signals      # 20 times SIGTERM, to torchrun or to one rank, then the same command again

Each goes on where it was stopped.

A kill: `torchrun --max-restarts 3 -m megagraph train --out RUN` loses a random rank at a random moment of a phase
(`bench/killer.py`). It holds if torchrun ends with 0 after one restart, and weights and metrics, without their times,
are those of the undisturbed run, bit for bit. A signal: after it the command ends by itself, and again with
`--resume auto` it goes on after the last step that was logged.

Fixed: seed 0 of moments and ranks, 2 layers of width 16 on a generated store of 600 nodes, 2 epochs, a checkpoint every
third step.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro

from bench.killer import PHASES
from bench.provenance import PACKAGE, RESULTS, current, write_rows
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store
from megagraph.run import Run

ROOT = Path(__file__).parent.parent
LAYOUTS = {
    "1,1,1": "",
    "2,1,1": "--microbatches 2",
    "1,2,1": "",
    "1,1,2": "--shard",
    "1,3,1": "",
    "2,1,2": "--microbatches 2",
}
WORKERS = (0, 2)
SECONDS = {
    "start": 1.5,
    "step": 0.05,
    "save": 0.15,
    "evaluation": 0.2,
    "exit": 0.3,
}  # a moment is drawn from 0 to these
FLAGS = (
    "--layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 2 --sample-nodes 6 --channels 3 --epochs 2 --batch-size 36 "
    "--checkpoint-every 3 --device cpu --timeout 60"
)
GIVE_UP = 600


def processes(plan: str) -> int:
    return math.prod(map(int, plan.split(",")))


def torchrun(plan: str, *arguments: object) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes(plan)]
    return [*map(str, command), *map(str, arguments)]


def train(folder: Path, plan: str, workers: int, *more: object) -> list[object]:
    flags = [*FLAGS.split(), *LAYOUTS[plan].split(), "--dataset", folder / "store", "--plan", plan]
    return ["train", *flags, "--workers", workers, *more]


def start(command: list[str], output: Path) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.open("a") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True, cwd=ROOT)


def finish(process: subprocess.Popen) -> int | None:
    """Wait for a process and give its exit status; ``None`` where it does not end and is killed."""
    try:
        return process.wait(GIVE_UP)
    except subprocess.TimeoutExpired:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()
        return None


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    opened = Run.open(run)
    lines = [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in opened.metrics()]
    return lines, opened.weights()


def equal(one: Path, other: Path) -> bool:
    (lines, weights), (their_lines, their_weights) = outcome(one), outcome(other)
    same = lines == their_lines and weights.keys() == their_weights.keys()
    return same and all(torch.equal(weights[name], their_weights[name]) for name in weights)


@cache
def undisturbed(folder: Path, plan: str) -> Path:
    run = folder / f"whole-{plan}"
    process = start(torchrun(plan, "-m", "megagraph", *train(folder, plan, 0, "--out", run)), folder / "whole.log")
    if finish(process) != 0:
        raise SystemExit((folder / "whole.log").read_text()[-3000:])
    return run


def kill(folder: Path, phase: str, plan: str, workers: int, seed: int) -> dict[str, Any]:
    """One run with one kill; where the run had ended before it, anew with a moment half as late."""
    draw = random.Random(f"{seed} {phase} {plan} {workers}")
    victim, seconds = draw.randrange(processes(plan)), draw.uniform(0.0, SECONDS[phase])
    while True:
        row = _kill(folder, phase, plan, workers, seed, victim, round(seconds, 4))
        if row["killed"] is not None or not row["holds"]:
            return row
        seconds /= 2


def _kill(folder: Path, phase: str, plan: str, workers: int, seed: int, victim: int, seconds: float) -> dict[str, Any]:
    expected = undisturbed(folder, plan)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        arguments = ["--max-restarts", "3", "-m", "bench.killer", phase, seconds, victim, place / "log"]
        command = train(folder, plan, workers, "--out", place / "run")
        process = start(torchrun(plan, *arguments, *command), place / "output")
        started = time.monotonic()
        code = finish(process)
        log = (place / "log").read_text().splitlines()
        row = {"phase": phase, "plan": plan, "workers": workers, "seed": seed, "rank": victim, "moment": seconds}
        row |= {"unit": "seconds", "seconds": round(time.monotonic() - started, 1), "exit_code": code}
        row["killed"] = next((line for line in log if line.startswith("killed")), None)
        row["restarts"] = max(int(line.split()[1]) for line in log if line.startswith("attempt"))
        row["equal"] = code == 0 and equal(place / "run", expected)
        row["lock_left"] = (place / "run" / "lock").exists()
        row["holds"] = row["equal"] and not row["lock_left"] and row["restarts"] == (row["killed"] is not None)
        if not row["holds"]:
            row["output"] = (place / "output").read_text()[-3000:]
        return row


def tell(folder: Path, plan: str, whom: str, seed: int) -> dict[str, Any]:
    """One run that is told to leave in the middle, and started again."""
    draw = random.Random(f"{seed} {plan} {whom}")
    expected = undisturbed(folder, plan)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        run = place / "run"
        command = torchrun(plan, "-m", "megagraph", *train(folder, plan, 0, "--resume", "auto", "--out", run))
        process = start(command, place / "output")
        after = draw.randrange(1, 12)
        while process.poll() is None and (not (run / "metrics.jsonl").exists() or steps_of(run) < after):
            time.sleep(0.01)
        time.sleep(draw.uniform(0.0, 0.1))
        target = process.pid
        if whom == "rank":
            target = draw.choice(sorted(child.pid for child in psutil.Process(process.pid).children()))
        os.kill(target, signal.SIGTERM)
        told = time.monotonic()
        first = finish(process)
        row = {"signal": "SIGTERM", "whom": whom, "plan": plan, "seed": seed, "unit": "seconds", "exit_code": first}
        row["seconds_to_leave"] = round(time.monotonic() - told, 2)
        logged = steps_of(run)
        row["exit_code_again"] = finish(start(command, place / "again"))
        said = (place / "again").read_text()
        row["steps_before"] = logged
        row["goes_on"] = f"resumed from {run / 'checkpoints' / f'step-{logged:06d}'}" in said or "test_accuracy" in said
        row["equal"] = row["exit_code_again"] == 0 and equal(run, expected)
        row["holds"] = row["goes_on"] and row["equal"]
        if not row["holds"]:
            row["output"] = (place / "output").read_text()[-2000:] + said[-2000:]
        return row


def steps_of(run: Path) -> int:
    return sum('"step": ' in line for line in (run / "metrics.jsonl").read_text().splitlines())


def main(signals: bool = False, at_once: int = 1, at_most: int | None = None, seed: int = 0) -> None:
    """Measure ``at_most`` of the cases that these sources have no row of."""
    name = "restarts_signals" if signals else "restarts"
    path = RESULTS / "cpu" / f"{name}.json"
    rows = list(filter(current, json.loads(path.read_text()))) if path.exists() else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_store(synthetic_graph(num_nodes=600, num_classes=3, in_features=16, seed=0), folder / "store")
        if signals:
            keys = ("plan", "whom", "seed")
            plans = [plan for plan in LAYOUTS if processes(plan) > 1]
            cases = [(plan, whom, seed + i) for i, plan, whom in product(range(2), plans, ("torchrun", "rank"))]
        else:
            keys = ("phase", "plan", "workers", "seed")
            cases = [(*case, seed) for case in product(PHASES, LAYOUTS, WORKERS)]
        done = {tuple(row[key] for key in keys) for row in rows}
        for plan in LAYOUTS:
            undisturbed(folder, plan)
        with ThreadPoolExecutor(at_once) as pool:
            measure = tell if signals else kill
            for row in pool.map(lambda case: measure(folder, *case), [c for c in cases if c not in done][:at_most]):
                rows.append(row)
                write_rows(name, rows, folder="cpu", children=PACKAGE)
                print(" ".join(f"{key}={value}" for key, value in row.items() if key != "unit"), flush=True)
    print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold")


if __name__ == "__main__":
    tyro.cli(main)
