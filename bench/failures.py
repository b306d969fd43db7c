"""How long a run outlives a rank that fails, and what it says: every kind of fault in every phase, over three layouts.

    python -m bench.failures                # kill, stop, hang and raise: the table, goes on where it was stopped
    python -m bench.failures --exits 100    # runs without a fault: how many of them do not end?
    python -m bench.failures --soak         # long runs, with kills and without: bench/soak.py

One rank of two fails (`tests/parallel/faulty.py`): kill is SIGKILL, stop SIGSTOP, hang a main thread that sleeps for
ever, raise an exception. `rank_seconds` is the time from the fault until the last rank that can still act is gone,
`launcher_seconds` until torchrun has returned. Bounds: timeout + 5 s and timeout + 40 s, of which torchrun spends 30 s
before it kills a stopped process.

Fixed: timeout 8 s, the last rank fails, 2 layers of width 16, the synthetic graph, 4 steps and an evaluation; `forward`
and `backward` strike inside the second step's stage. Two runs share the machine; a run is measured again if this
program itself was held up for a second meanwhile (`held_up_seconds`), as the clock would then count what the machine
did.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro

import megagraph as mg
from bench.provenance import PACKAGE, RESULTS, current, write_rows
from bench.soak import soak as long_runs

ROOT = Path(__file__).parent.parent
TIMEOUT, RANK_BOUND, LAUNCHER_BOUND, GIVE_UP = 8, 8 + 5, 8 + 40, 600
HELD_UP, ATTEMPTS = 1.0, 5
KINDS = ("kill", "raise", "hang", "stop")
PHASES = ("start", "data", "build", "forward", "backward", "optimizer", "evaluation", "save", "teardown")
PLANS = ("2,1,1", "1,2,1", "1,1,2")  # pp, cp, dp
CHILDREN = (*PACKAGE, "tests/parallel")
FLAGS = "--layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 1 --batch-size 64 --max-steps 4 --device cpu"


def compile_loops() -> None:
    """All that the runs compile is kept on disk, or they would wait for their compilers longer than for each other."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "megagraph", "train", *FLAGS.split(), "--out", f"{folder}/run"]
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    q = torch.zeros(1, 1, 1, 1, requires_grad=True)
    mg.biased_attention(q, q, q, impl="blocked_long").sum().backward()  # as in a ring


def start(kind: str, phase: str, plan: str, timeout: int, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/parallel/faulty.py"), kind, phase, "1", str(folder / "log"), "train"]
    command += [*FLAGS.split(), "--timeout", str(timeout), "--plan", plan, "--out", str(folder / "run")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def case(kind: str, phase: str, plan: str, timeout: int = TIMEOUT) -> dict[str, Any]:
    """Start a run and look at its processes until all are gone."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launcher = start(kind, phase, plan, timeout, folder)
        deadline = time.monotonic() + GIVE_UP
        gone: dict[int, float] = {}
        held_up, looked = 0.0, time.monotonic()
        while launcher.poll() is None and time.monotonic() < deadline:
            for rank in (0, 1):
                log = folder / f"log-{rank}"
                if rank not in gone and log.exists() and (text := log.read_text()) and not runs(int(text)):
                    gone[rank] = time.monotonic()
            time.sleep(0.02)
            held_up, looked = max(held_up, time.monotonic() - looked), time.monotonic()
        ended = time.monotonic()
        hangs = launcher.poll() is None
        if hangs:
            launcher.kill()
            for log in (folder / "log-0", folder / "log-1"):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    os.kill(int(log.read_text()), 9)
        output = (folder / "output").read_text(errors="replace")
        row = {"kind": kind, "phase": phase, "plan": plan, "unit": "seconds", "timeout": timeout}
        row |= {"held_up_seconds": round(held_up, 2)}
        fault = folder / "log-fault"
        if not fault.exists():
            ended_well = kind == "none" and launcher.returncode == 0
            return row | {"error": None if ended_well else output[-3000:], "hangs": hangs}
        struck = float(fault.read_text())
        alive = [0] if kind in ("kill", "stop") else [0, 1]
        causes = dict(re.findall(r"megagraph: rank (\d+) leaves, first cause: (.*)", output))
        return row | {
            "rank_seconds": round(max(gone.get(rank, ended) for rank in alive) - struck, 2),
            "launcher_seconds": round(ended - struck, 2),
            "hangs": hangs,
            "exit_code": launcher.returncode,
            "silent_ranks": [rank for rank in alive if str(rank) not in causes],
            "causes": sorted(set(causes.values())),
        }


def undisturbed(kind: str, phase: str, plan: str) -> dict[str, Any]:
    for _ in range(ATTEMPTS):
        row = case(kind, phase, plan)
        if row["held_up_seconds"] < HELD_UP:
            break
    return row


def holds(row: dict[str, Any]) -> bool:
    """Bounds, an exit code that is not 0, and one cause on all ranks: that of the rank that failed."""
    return (
        "error" not in row
        and not row["hangs"]
        and row["exit_code"] != 0
        and row["rank_seconds"] <= RANK_BOUND
        and row["launcher_seconds"] <= LAUNCHER_BOUND
        and not row["silent_ranks"]
        and len(row["causes"]) == 1
        and row["causes"][0].startswith("rank 1 ")
    )


def main(exits: int = 0, soak: bool = False, at_once: int = 2, at_most: int | None = None) -> None:
    """Measure ``at_most`` of the cases without a row of these sources; ``--exits N`` counts normal exits instead."""
    compile_loops()
    if soak:
        return long_runs()
    if exits:
        with ThreadPoolExecutor(at_once) as pool:
            ended = list(pool.map(lambda i: undisturbed("none", "none", PLANS[i % len(PLANS)]), range(exits)))
        failed = [row for row in ended if row["error"] is not None]
        hanging = sum(row["hangs"] for row in ended)
        print(*(row["error"] for row in failed), sep="\n")
        print(f"{hanging} of {exits} runs did not end, {len(failed)} failed")
        row = {"runs": exits, "hanging": hanging, "failed": len(failed), "unit": "runs", "at_once": at_once}
        write_rows("exits", [row], children=CHILDREN)
        return
    path = RESULTS / "cpu" / "failures.json"
    rows = list(filter(current, json.loads(path.read_text()))) if path.exists() else []
    done = {(row["kind"], row["phase"], row["plan"]) for row in rows}
    cases = [case for case in product(KINDS, PHASES, PLANS) if case not in done][:at_most]
    with ThreadPoolExecutor(at_once) as pool:
        for row in pool.map(lambda arguments: undisturbed(*arguments), cases):
            rows.append(row | {"holds": holds(row)})
            write_rows("failures", rows, folder="cpu", children=CHILDREN)  # after each, as the table takes half an hour
            print(" ".join(f"{k}={v}" for k, v in rows[-1].items() if k not in ("unit", "timeout")), flush=True)
    print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold")


if __name__ == "__main__":
    tyro.cli(main)
