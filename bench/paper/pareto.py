"""The paper's picture of step time and memory: every plan of four processes, predicted; the front and some, measured.

    python -m bench.paper.pareto run       # as root; about 15 minutes, wants two cores for itself
    python -m bench.paper.pareto judge     # from its rows: a verdict, and pareto.svg

Four processes of one host, each with 0.45 of a core (``bench/network.py``), profile as ``megagraph profile`` does. Rank
0 fits and lets the search find all plans, each with its fastest split of the layers and with its lightest; all of them
are run on paper before any runs. Those on the predicted front, and DRAWN others of seed 0, then make two steps to warm
up that count the bytes of all tensors alive at their peak, and ROUNDS timed ones, all plans once before any again.
Losses of all must agree.

Fixed: graph, model, batch and optimizer of ``bench.paper.cluster``.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from scipy.stats import spearmanr

from bench import network
from bench.network import Bed
from bench.paper.cluster import CONFIG
from bench.paper.real_plans import DEVICE, Bench, predict
from bench.provenance import RESULTS, sized, write_judgement, write_rows
from bench.tables import draw, save
from megagraph import auto
from megagraph.planner import fit, search
from megagraph.planner.fitting import mape
from megagraph.planner.plan import Plan

BED = Bed(nodes=1, per_node=4, mbit=1000, speeds=(0.45,) * 4)
DRAWN, ROUNDS = sized((24, 3), quick=(2, 1))
TIMEOUT = 3600.0
LEAST, KINDS, CORRELATION, MAPE, MEMORY, SLACK = 166, 5, 0.9, 0.15, 0.10, 1.10
FOLDER = RESULTS / "cpu" / "pareto"


def run() -> None:
    """Predict all plans, train some, and write their rows."""
    if (reason := network.refusal()) is not None:
        raise SystemExit(f"no hosts: {reason}")
    network.run(BED, ("-m", "bench.paper.pareto", "worker"), TIMEOUT)
    judge()


def worker() -> None:
    """A process of the bed, started by ``run``."""
    rank = int(os.environ["RANK"])
    network.take_share(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    bench = Bench(CONFIG)
    profiled = bench.profile()
    shared: list[Any] = [None]
    rows: list[dict[str, Any]] = []
    if rank == 0:
        cost = fit(profiled)
        found = search(cost, cost.profiled()[0], BED.ranks, auto.memory_bytes(DEVICE))
        front = [candidate.plan for candidate in found.pareto]
        possible = [candidate.plan for candidate in found.candidates if candidate.pruned is None]
        plans = tuple(dict.fromkeys([*front, *possible]))
        rows = predict(cost, plans)
        for row in rows[: len(front)]:
            row["front"] = True
        others = range(len(front), len(plans))
        drawn = random.Random(0).sample(others, min(DRAWN, len(others)))
        shared = [[(i, plans[i]) for i in (*range(len(front)), *sorted(drawn))]]
        write_rows("pareto/profile", profiled, folder="cpu")
    dist.broadcast_object_list(shared)
    run_plans: list[tuple[int, Plan]] = shared[0]
    steps, losses = [], []
    for i, plan in run_plans:
        step, track = bench.build(plan)
        loss, most = track()
        losses.append(loss)
        peaks: list[Any] = [None] * BED.ranks
        dist.all_gather_object(peaks, most)
        steps.append(step)
        if rank == 0:
            rows[i]["measured_bytes"] = peaks
    assert np.ptp(losses) < 1e-4, f"the plans do not compute the same: {losses}"
    samples = [[step()[1] for step in steps] for _ in range(ROUNDS)]
    if rank == 0:
        for (i, _), *seconds in zip(run_plans, *samples, strict=True):
            rows[i]["measured_seconds"] = seconds
        write_rows("pareto/plans", [row | {"bed": asdict(BED)} for row in rows], folder="cpu")
    dist.barrier()
    dist.destroy_process_group()


def kind_of(row: dict[str, Any]) -> str:
    return " + ".join(name for name in ("pp", "cp", "dp") if row[name] > 1)


def judge() -> None:
    """Print how right the picture is, and draw it."""
    rows = json.loads((FOLDER / "plans.json").read_text(encoding="utf-8"))
    ran = [row for row in rows if "measured_seconds" in row]
    predicted = np.array([[row["predicted_seconds"], max(row["predicted_bytes"])] for row in ran])
    measured = np.array([[np.median(row["measured_seconds"]), max(row["measured_bytes"])] for row in ran])
    front = [i for i, row in enumerate(ran) if row.get("front")]
    # of a plan on the predicted front: nothing that ran is better than it by more than SLACK in both
    kept = [not any((SLACK * other < measured[i]).all() for other in measured) for i in front]
    found = {
        "plans": (len(rows), ">=", LEAST),
        "kinds of strategy": (len({kind_of(row) for row in rows}), ">=", KINDS),
        "Spearman of seconds": (float(spearmanr(predicted[:, 0], measured[:, 0]).statistic), ">=", CORRELATION),
        "MAPE of seconds": (mape(predicted[:, 0].tolist(), measured[:, 0].tolist()), "<=", MAPE),
        "largest error of bytes": (float(np.abs(predicted[:, 1] / measured[:, 1] - 1).max()), "<=", MEMORY),
        "part of the front that stays": (float(np.mean(kept)), ">=", 1.0),
    }
    for (seconds, size), (was, were), row in sorted(zip(predicted.tolist(), measured.tolist(), ran, strict=True)):
        mark = "  front" if row.get("front") else ""
        print(f"{seconds:7.3f} {was:7.3f} s {size / 2**20:7.1f} {were / 2**20:7.1f} MiB  {row['name']}{mark}")
    for name, (value, sign, bound) in found.items():
        holds = value >= bound if sign == ">=" else value <= bound
        print(f"  {name:<30} {value:8.3f}  {sign} {bound}  {'holds' if holds else 'FAILS'}")
    values = {name: value for name, (value, *_) in found.items()}
    write_judgement(FOLDER / "judgement.json", values, FOLDER / "plans.json")
    figure, axes = draw(5.5, 4)
    for kind in sorted({kind_of(row) for row in rows}):
        points = [(r["predicted_seconds"], max(r["predicted_bytes"]) / 2**20) for r in rows if kind_of(r) == kind]
        axes.plot(*zip(*points, strict=True), ".", markersize=4, label=kind)
    ends = sorted((row["predicted_seconds"], max(row["predicted_bytes"]) / 2**20) for row in rows if row.get("front"))
    axes.plot(*zip(*ends, strict=True), "k-", drawstyle="steps-post", linewidth=0.8, label="predicted front")
    for (seconds, size), (was, were) in zip(predicted / (1, 2**20), measured / (1, 2**20), strict=True):
        axes.plot([seconds, was], [size, were], color="0.6", linewidth=0.5, zorder=0)
    axes.plot(measured[:, 0], measured[:, 1] / 2**20, "kx", markersize=4, label="measured")
    axes.set(xlabel="seconds of a step", ylabel="peak MiB of a rank", xscale="log", yscale="log")
    axes.legend(frameon=False, fontsize=7)
    save(figure, rows[0], FOLDER / "pareto.svg")


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "worker": worker, "judge": judge})
