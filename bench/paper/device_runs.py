"""Trainings on one GPU, by the command line: graphs that are small, whole or cut up, and processes that share it.

    python -m bench.paper.device_runs --root DATA           # all at once, a minute or two; times say nothing then
    python -m bench.paper.device_runs --root DATA --judge   # again, from the rows alone

Asked: 16 bits are as accurate as fp32 on Citeseer, to two points; several processes make the steps of one, with every
way to share a sequence and with pipelines, whose losses are at most CLOSE apart. The rest says that a training runs,
how accurate it gets and what it holds. Rows: bench/results/DEVICE/runs.json.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from bench.paper.live_bytes import MIB
from bench.processes import run
from bench.provenance import PACKAGE, RESULTS, device_folder, sized, write_rows
from bench.tables import markdown

CLOSE, POINTS = 1e-4, 0.02
EPOCHS = sized((4, 1, 60, 15), quick=(1, 1, 2, 1))
_SHARED = "--dataset ROOT:cora --batching cluster --sequence-nodes 512 --batch-size 4 --layers 4 --epochs 4 --seed 0"
RUNS = {  # processes, and flags
    "citeseer": (1, f"--dataset ROOT:citeseer --epochs {EPOCHS[0]} --workers 2"),
    "citeseer, 16 bits": (1, f"--dataset ROOT:citeseer --epochs {EPOCHS[0]} --workers 2 --dtype bf16"),
    "computers, 16 bits": (1, f"--dataset ROOT:computers --epochs {EPOCHS[1]} --workers 3 --dtype bf16"),
    "wordnet30 whole, 16 bits": (
        1,
        "--dataset ROOT/wordnet30/raw/wordnet30.npz --batching full --hops 1 --top 0 --super-nodes 256 --dtype bf16 "
        f"--epochs {EPOCHS[2]}",
    ),
    "Graphormer, sequences of 6,784, 16 bits": (
        1,
        "--dataset ROOT:computers --model graphormer --batching cluster --sequence-nodes 6784 --batch-size 1 "
        f"--dtype bf16 --epochs {EPOCHS[3]}",
    ),
    "cora, one process": (1, _SHARED),
    **{f"cora, cp 2, {way}": (2, f"{_SHARED} --plan 1,2,1 --comm {way}") for way in ("ring", "allgather", "ulysses")},
    "cora, pp 2, dp 2": (4, f"{_SHARED} --plan 2,1,2 --microbatches 2"),
}
RUNS = sized(RUNS, quick={name: RUNS[name] for name in ("citeseer", "cora, one process", "cora, cp 2, ulysses")})


def flags_of(flags: str, root: Path) -> list[str]:
    """Words of a command; ROOT:NAME is a data set in the folder, ROOT the folder."""
    found = []
    for word in shlex.split(flags):
        folder, _, name = word.partition(":")
        found += [name, "--root", str(root)] if folder == "ROOT" and name else [word.replace("ROOT", str(root))]
    return found


def train(name: str, root: Path, out: Path) -> dict[str, Any]:
    """The row of a run."""
    return {"run": name} | run_of(*RUNS[name], root, out)


def run_of(processes: int, flags: str, root: Path, out: Path) -> dict[str, Any]:
    """What a training by the command line says; its curve: seconds of steps, validation and test accuracy, by epoch."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    device = "cpu" if not torch.cuda.is_available() else "cuda:0" if processes > 1 else "cuda"
    given = [*flags_of(flags, root), "--device", device, "--out", out]
    run(*(several if processes > 1 else []), "-m", "megagraph", "train", *given)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((out / "summary.json").read_text())
    fields = ("test_accuracy", "best_val_accuracy", "steps", "peak_memory_bytes", "parameters")
    kept = {field: summary[field] for field in fields}
    losses = [line["loss"] for line in lines if "step" in line]
    epochs = [line for line in lines if "epoch" in line]
    seconds = accumulate(line["train_seconds"] for line in epochs)
    curve = [(x, line["val_accuracy"], line["test_accuracy"]) for x, line in zip(seconds, epochs, strict=True)]
    return {"flags": flags, "processes": processes, "unit": "accuracy"} | kept | {"losses": losses, "curve": curve}


def judge(rows: list[dict[str, Any]]) -> None:
    """Print a table and whether what is asked holds."""
    found = {row["run"]: row for row in rows}
    body = []
    for name, row in found.items():
        peak = f"{row['peak_memory_bytes'] / MIB:.0f}"
        body.append([name, str(row["steps"]), f"{row['losses'][-1]:.4f}", f"{100 * row['test_accuracy']:.1f}", peak])
    print(markdown(["run", "steps", "last loss", "test, %", "MiB a process"], body))
    if "citeseer, 16 bits" in found:
        less = found["citeseer"]["test_accuracy"] - found["citeseer, 16 bits"]["test_accuracy"]
        print(f"16 bits: {100 * less:.1f} points less, at most {100 * POINTS:.0f}: {verdict(less <= POINTS)}")
    one = found["cora, one process"]["losses"]
    for name, row in found.items():
        if row["processes"] > 1:
            off = max(abs(a - b) / abs(b) for a, b in zip(row["losses"], one, strict=True))
            print(f"{name}: losses {off:.1e} apart, at most {CLOSE}: {verdict(off <= CLOSE)}")


def verdict(holds: bool) -> str:
    """How a judgement says it."""
    return "holds" if holds else "FAILS"


def main(root: Path, judge_only: Annotated[bool, tyro.conf.arg(name="judge")] = False) -> None:
    """Train and judge, or judge the rows that are there."""
    if judge_only:
        return judge(json.loads((RESULTS / device_folder() / "runs.json").read_text()))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(RUNS)) as pool:
        began = {pool.submit(train, name, root.resolve(), Path(folder) / str(i)): name for i, name in enumerate(RUNS)}
        found: dict[str, dict[str, Any]] = {}
        failed = []
        for future in as_completed(began):
            try:
                found[began[future]] = future.result()
            except SystemExit as error:  # the others go on
                failed.append(f"{began[future]}: {error}")
                print(failed[-1], flush=True)
                continue
            rows = [found[name] for name in RUNS if name in found]
            write_rows("runs", rows, children=PACKAGE)  # what has ended is kept, whatever ends the others
    if failed:
        raise SystemExit("\n".join(["failed, and without a row:", *failed]))
    judge(rows)


if __name__ == "__main__":
    tyro.cli(main)
