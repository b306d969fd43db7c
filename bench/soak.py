"""Long runs of two processes: what grows, and what is left behind. Run by `python -m bench.failures --soak`.

Undisturbed: 5,500 steps, of which the first 500 are warm-up; once a second each rank's unique memory (USS) and open
files are looked at. The slope of USS over steps is Theil and Sen's, with its 95 % interval. It holds if the interval
contains 0 or ends below 0.1 MiB for 1,000 steps, and no rank has more files open at the end than after the warm-up.

Killed: 2,000 steps under `torchrun --max-restarts 99` with two loader workers a rank, a random rank killed once a
minute. It holds if the run ends with 0 and leaves no process, no zombie, no file in /dev/shm and no lock.

Fixed: 2 layers of width 16, the generated graph of 600 nodes, plan 1,1,2, a checkpoint every 200 steps, seed 0.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from scipy.stats import theilslopes

from bench.provenance import PACKAGE, write_rows
from bench.restarts import finish, start, steps_of, torchrun
from megagraph.data.datasets import synthetic_graph
from megagraph.data.store import write_store

WARM_UP, STEPS, KILLED_STEPS, KILL_SECONDS = 500, 5_000, 2_000, 60.0
FLAGS = (
    "--layers 2 --dim 16 --ffn-dim 16 --heads 2 --samples 2 --sample-nodes 6 --channels 3 --epochs 10_000 "
    "--batch-size 4 --checkpoint-every 200 --device cpu --timeout 60 --plan 1,1,2"
)


def command(folder: Path, steps: int, *more: object) -> list[object]:
    return [*FLAGS.split(), "--dataset", folder / "store", "--max-steps", steps, "--out", folder / "run", *more]


def undisturbed(folder: Path) -> dict[str, Any]:
    launcher = start(torchrun("1,1,2", "-m", "megagraph", "train", *command(folder, WARM_UP + STEPS)), folder / "log")
    seen: dict[int, list[tuple[int, int, int]]] = {}
    while launcher.poll() is None:
        time.sleep(1.0)
        steps = steps_of(folder / "run") if (folder / "run/metrics.jsonl").exists() else 0
        if not WARM_UP <= steps < WARM_UP + STEPS:
            continue
        for rank in psutil.Process(launcher.pid).children():
            looked = (steps, rank.memory_full_info().uss, rank.num_fds())
            seen.setdefault(rank.pid, []).append(looked)
    slopes, lows, highs, files = [], [], [], []
    for looked in seen.values():
        steps, memory, opened = np.array(looked).T
        slope, _, low, high = (1000 * x / 2**20 for x in theilslopes(memory, steps, 0.95))
        slopes, lows, highs = [*slopes, round(slope, 4)], [*lows, round(low, 4)], [*highs, round(high, 4)]
        files.append([int(opened[: len(opened) // 10 + 1].max()), int(opened[-len(opened) // 10 :].max())])
    row: dict[str, Any] = {"case": "undisturbed", "unit": "MiB per 1000 steps", "steps": STEPS}
    row["exit"] = launcher.returncode
    row |= {"samples": min(map(len, seen.values())), "uss_slope": slopes, "low": lows, "high": highs}
    row |= {"open_files": files}
    grows = any(high >= 0.1 and low > 0.0 for low, high in zip(lows, highs, strict=True))
    row["holds"] = launcher.returncode == 0 and not grows and all(last <= first for first, last in files)
    return row


def killed(folder: Path) -> dict[str, Any]:
    draw, shared = random.Random(0), set(os.listdir("/dev/shm"))
    arguments = ["--max-restarts", 99, "-m", "megagraph", "train", *command(folder, KILLED_STEPS, "--workers", 2)]
    launcher = start(torchrun("1,1,2", *arguments), folder / "log")
    kills, next_kill = 0, time.monotonic() + KILL_SECONDS
    while launcher.poll() is None:
        time.sleep(0.2)
        if time.monotonic() < next_kill:
            continue
        ranks = psutil.Process(launcher.pid).children()
        if ranks:
            draw.choice(ranks).kill()
            kills, next_kill = kills + 1, time.monotonic() + KILL_SECONDS
    code = finish(launcher)
    time.sleep(5.0)
    mine = str(folder)
    left = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if any(mine in word for word in process.info["cmdline"] or ()):
            left.append(" ".join(process.info["cmdline"])[:200])
    zombies = sum(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children(recursive=True))
    row: dict[str, Any] = {"case": "killed", "unit": "steps", "steps": steps_of(folder / "run"), "kills": kills}
    row["exit"] = code
    row |= {"processes_left": left, "zombies": zombies, "shm_left": sorted(set(os.listdir("/dev/shm")) - shared)}
    row["lock_left"] = (folder / "run/lock").exists()
    clean = not (left or zombies or row["shm_left"] or row["lock_left"])
    row["holds"] = code == 0 and clean and row["steps"] == KILLED_STEPS
    return row


def soak() -> None:
    rows = []
    for case in (undisturbed, killed):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            write_store(synthetic_graph(num_nodes=600, num_classes=3, in_features=16, seed=0), folder / "store")
            try:
                rows.append(case(folder))
            except (ValueError, subprocess.SubprocessError):
                print((folder / "log").read_text()[-3000:])
                raise
            print(rows[-1], flush=True)
            if not rows[-1]["holds"]:
                print((folder / "log").read_text()[-3000:])
    write_rows("soak", rows, folder="cpu", children=PACKAGE)
