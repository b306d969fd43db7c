"""Does what was measured of one model kind predict another? Fitted to HierarchicalGT, asked about Graphormer.

    python -m bench.paper.transfer measure   # wants the machine for itself
    python -m bench.paper.transfer judge     # from the rows alone

Sizes are a part of the 216 of ``bench.paper.cost_model``, whose two kinds take turns: seconds of a forward and backward
pass, the mean of 5 runs but the slowest, and bytes at the peak of a training step. The two differ by a table of degrees
and its codes, which the cost model knows, and by nothing else that it knows of.

Fixed before the rows: the sizes, and bounds of ``bench.paper.cost_model``, which are the paper's for a held-out third.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
import tyro
from tqdm import tqdm

from bench.paper.cost_model import LAYERS, ROUNDS, TARGETS, THREADS, fields, point, training_pass
from bench.paper.device_runs import verdict
from bench.provenance import RESULTS, device_folder, sized, write_judgement, write_rows
from megagraph.models.config import ModelName
from megagraph.planner.fitting import fit_memory, fit_seconds, mape, predict_peak, time_errors
from megagraph.planner.measure.clock import average
from megagraph.planner.measure.memory import observe_memory

SIZES = sized([*product((1, 4), (2, 8, 24), (4, 16), (32, 128))], quick=[*product((1, 2), LAYERS[:2], (4,), (32, 64))])
KINDS: tuple[ModelName, ModelName] = ("hierarchical", "graphormer")


def measure() -> None:
    """Write bench/results/DEVICE/transfer/rows.json."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(THREADS)
    points = [(kind, replace(point(*size), model=kind)) for size in SIZES for kind in KINDS]
    rows = [{"network": kind, "unit": "bytes"} | observe_memory(p, device) for kind, p in tqdm(points, desc="memory")]
    passes: list[Callable[[], float]] = [training_pass(p, device) for _, p in points]
    for run in passes:
        run()  # warm-up
    samples = [[run() for run in tqdm(passes, desc=f"time {i + 1}/{ROUNDS}")] for i in range(ROUNDS)]
    for (kind, p), own in zip(points, zip(*samples, strict=True), strict=True):
        row = fields(p) | {"kind": "model", "direction": "forward_backward", "unit": "s", "network": kind}
        rows.append(row | {"all_seconds": own} | average([*own]))
    write_rows("rows", rows, folder=f"{device_folder()}/transfer")
    judge()


def judge() -> None:
    """Print how far Graphormer is from what HierarchicalGT's rows say, write judgement.json."""
    path = RESULTS / device_folder() / "transfer" / "rows.json"
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in json.loads(path.read_text()):
        of.setdefault((row["kind"], row["network"]), []).append(row)
    times, memory = ([of[kind, model] for model in KINDS] for kind in ("model", "memory"))
    fitted = fit_memory(memory[0])
    peaks = [row["peak_bytes"] for row in memory[1]]
    found = {
        "time MAPE": time_errors(fit_seconds(times[0]), times[1])["time_mape"],
        "memory MAPE": mape([predict_peak(fitted, row) for row in memory[1]], peaks),
    }
    for name, value in found.items():
        _, bound = TARGETS[f"random third: {name}"]
        print(f"{name} of {KINDS[1]} by rows of {KINDS[0]}: {value:.4f}, at most {bound}: {verdict(value <= bound)}")
    write_judgement(path.with_name("judgement.json"), found, path)


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"measure": measure, "judge": judge})
