"""How long a checkpoint holds up training: `python -m bench.saves`.

Three times are taken in turn, after a first round that is not counted: one copy of the state into memory that is there
already, the call that starts a save, and the whole save until all of it is on disk. Asked of it: the call takes at most
1.5 copies and a quarter of the whole save (medians).

Fixed: 100 tensors of 2^20 fp32 numbers (400 MiB), 7 rounds, one process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import tyro

from bench.provenance import write_rows
from megagraph.checkpoint import Checkpoints

TENSORS, NUMBERS, ROUNDS = 100, 2**20, 7


def seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def main(folder: Path | None = None) -> None:
    """Write checkpoints below ``folder``, a temporary one by default, and the row."""
    state = {f"tensor.{i}": torch.randn(NUMBERS) for i in range(TENSORS)}
    copy = {name: torch.zeros_like(x) for name, x in state.items()}
    times: dict[str, list[float]] = {"copy": [], "held": [], "whole": []}
    with tempfile.TemporaryDirectory(dir=folder) as place:
        checkpoints = Checkpoints(Path(place) / "checkpoints")
        for step in range(ROUNDS + 1):
            found = {"copy": seconds(lambda: [copy[name].copy_(x) for name, x in state.items()])}
            found["held"] = seconds(lambda step=step: checkpoints.save(step, state, {"step": step}))
            found["whole"] = found["held"] + seconds(checkpoints.wait)
            for name, value in found.items() if step else ():
                times[name].append(value)
    row = {"bytes": TENSORS * NUMBERS * 4, "unit": "seconds", "rounds": ROUNDS}
    for name, values in times.items():
        row |= {name: round(median(values), 4), f"{name}_range": [round(min(values), 4), round(max(values), 4)]}
    row |= {
        "held_per_copy": round(row["held"] / row["copy"], 3),
        "held_per_whole": round(row["held"] / row["whole"], 3),
    }
    row["holds"] = row["held_per_copy"] <= 1.5 and row["held_per_whole"] <= 0.25
    write_rows("saves", [row])
    print(" ".join(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    tyro.cli(main)
