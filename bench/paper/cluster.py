"""Plans on hosts that a slow link joins, predicted from a profile and then trained: do predictions hold beyond a host?

    python -m bench.paper.cluster run [--beds NAMES]     # as root; beds that have no rows of these sources yet
    python -m bench.paper.cluster judge                  # from the rows: a verdict a bed, plans.svg, and what the code
                                                         # at hand predicts and chooses from the beds' profiles

A bed (``bench/network.py``) is two hosts whose link is shaped, and processes that each have a fixed share of a core. On
it all processes profile as ``megagraph profile`` does, without a loader; rank 0 fits, predicts every plan of the list,
and lets the search choose one, all before any plan runs. Then each makes a step to warm up and ROUNDS timed ones, all
plans once before any runs again, and further rounds until the medians of odd and even ones rank the plans alike
(AGREE), at most MOST_ROUNDS. A step is timed from barrier to barrier. Losses of all plans must agree.

Fixed: a generated graph of 4,400 nodes, 64 features, seed 0; HierarchicalGT of 8 layers, d = 64, 4 heads, FFN 64,
buckets, dropout 0.1; 16 sequences of 256 regular and 16 super nodes; AdamW, fp32.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from scipy.stats import spearmanr

from bench import network
from bench.network import Bed
from bench.paper import real_plans
from bench.paper.real_plans import Bench, predict
from bench.provenance import RESULTS, current, rows_of, sized, write_judgement, write_rows
from bench.tables import draw, save
from megagraph import auto, files
from megagraph.planner import CostModel, fit, search
from megagraph.planner.fitting import mape
from megagraph.planner.plan import Plan

CONFIG = replace(real_plans.CONFIG, dim=sized(64, quick=32), ffn_dim=sized(64, quick=32))
LAYERS = CONFIG.layers
BEDS: dict[str, Bed] = {
    "2x1-16": Bed(per_node=1, mbit=16, speeds=(0.9, 0.9)),
    "2x2-20": Bed(per_node=2, mbit=20, speeds=(0.45,) * 4),
    "2x2-50": Bed(per_node=2, mbit=50, speeds=(0.45,) * 4),
    "2x1-50-half": Bed(per_node=1, mbit=50, speeds=(0.9, 0.45)),
}
BEDS = sized(BEDS, quick={"2x1-50-half": BEDS["2x1-50-half"]})
TWO = (
    Plan(dp=2),
    Plan(dp=2, shard=True),
    Plan(cp=2),
    Plan(cp=2, comm="allgather"),
    *(Plan(pp=2, layers=(4, 4), num_microbatches=k) for k in (1, 2, 4, 16)),
    Plan(pp=2, layers=(6, 2), num_microbatches=4),
    Plan(pp=2, layers=(2, 6), num_microbatches=4),
    Plan(pp=2, layers=(4, 4), num_microbatches=8, schedule="1f1b"),
    Plan(pp=2, layers=(2, 2, 2, 2), stages_per_rank=2, num_microbatches=4, schedule="interleaved"),
)
FOUR = (
    Plan(dp=4),
    Plan(dp=4, shard=True),
    Plan(cp=4),
    Plan(cp=4, comm="allgather"),
    Plan(cp=2, dp=2),
    *(Plan(pp=4, layers=(2, 2, 2, 2), num_microbatches=k) for k in (1, 4, 16)),
    Plan(pp=4, layers=(2, 2, 2, 2), num_microbatches=8, schedule="1f1b"),
    Plan(pp=2, dp=2, layers=(4, 4), num_microbatches=2),
    Plan(pp=2, dp=2, layers=(4, 4), num_microbatches=8),
    Plan(pp=2, dp=2, layers=(4, 4), num_microbatches=4, schedule="1f1b"),
    Plan(pp=2, cp=2, layers=(4, 4), num_microbatches=4),
)
ROUNDS, MOST_ROUNDS = sized((4, 10), quick=(2, 2))
AGREE, TIMEOUT = 0.9, 7200.0
CORRELATION, REGRET, MAPE, SPAN = 0.9, 1.1, 0.15, 2.0
PLENTY = 2.0**36  # bytes, of which these plans need a hundredth
FOLDER = RESULTS / "cpu" / "cluster"


def agreement(samples: np.ndarray) -> float:
    """Spearman of the medians of odd and even rounds; samples [rounds, plans]."""
    return float(spearmanr(np.median(samples[::2], axis=0), np.median(samples[1::2], axis=0)).statistic)


def run(beds: tuple[str, ...] = tuple(BEDS), again: bool = False) -> None:
    """Train the plans of every bed, and write its rows.

    Args:
        again: beds that have rows of these sources, too.
    """
    if (reason := network.refusal()) is not None:
        raise SystemExit(f"no hosts: {reason}")
    for name in beds:
        path = FOLDER / f"{name}.json"
        if again or not path.exists() or not all(map(current, rows_of(path))):
            network.run(BEDS[name], ("-m", "bench.paper.cluster", "worker", name), TIMEOUT)


def worker(name: tyro.conf.Positional[str]) -> None:
    """A process of a bed, started by ``run``."""
    bed, rank = BEDS[name], int(os.environ["RANK"])
    network.take_share(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    bench = Bench(CONFIG)
    profiled = bench.profile()
    chosen: list[Any] = [None, None]
    if rank == 0:
        cost = fit(profiled)
        best = choose(cost, bed, auto.memory_bytes(real_plans.DEVICE))
        listed = TWO if bed.ranks == 2 else FOUR
        plans = listed if best in listed else (*listed, best)
        chosen = [plans, best]
        rows = [row | {"bed": name, **asdict(bed)} for row in predict(cost, plans)]
        write_rows(f"{name}-profile", profiled, folder="cpu/cluster")
    dist.broadcast_object_list(chosen)
    plans, best = chosen
    steps = [bench.build(plan)[0] for plan in plans]
    losses = [step()[0] for step in steps]
    assert np.ptp(losses) < 1e-4, f"the plans do not compute the same: {losses}"
    samples: list[list[float]] = []
    agree = [False]
    while len(samples) < ROUNDS or (not agree[0] and len(samples) < MOST_ROUNDS):
        samples += [[step()[1] for step in steps] for _ in range(2)]
        agree = [agreement(np.array(samples)) >= AGREE]
        dist.broadcast_object_list(agree)  # the clocks of the ranks differ a little
    if rank == 0:
        for i, row in enumerate(rows):
            row |= {"measured_seconds": [run[i] for run in samples], "chosen": plans[i] == best}
        write_rows(name, rows, folder="cpu/cluster")
        print(verdict(rows)[0], flush=True)
    dist.barrier()
    dist.destroy_process_group()


def choose(cost: CostModel, bed: Bed, limit: float) -> Plan:
    """What the search chooses, as the lists have it."""
    best = search(cost, cost.profiled()[0], bed.ranks, limit).best.plan
    return replace(best, layers=best.layers if best.pp > 1 else ())


def predicted_anew(name: str) -> list[dict[str, Any]]:
    """The rows of a bed with what the code at hand predicts, and chooses, from the bed's profile."""
    profiled, rows = (json.loads((FOLDER / f"{name}{part}.json").read_text("utf-8")) for part in ("-profile", ""))
    cost = fit(profiled)
    plans = tuple(files.typed(Plan, {key: row[key] for key in asdict(Plan())}, "a plan") for row in rows)
    best = choose(cost, BEDS[name], PLENTY)
    assert best in plans, f"nobody has measured what is chosen now, {best}"
    anew = zip(rows, predict(cost, plans), plans, strict=True)
    return [row | predicted | {"chosen": plan == best} for row, predicted, plan in anew]


def verdict(rows: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """What the rows of a bed say, in lines and in numbers."""
    samples = np.array([row["measured_seconds"] for row in rows]).T
    measured, predicted = np.median(samples, axis=0), np.array([row["predicted_seconds"] for row in rows])
    chosen = next(i for i, row in enumerate(rows) if row["chosen"])
    found = {
        "rounds agree": (agreement(samples), ">=", AGREE),
        "slowest / fastest": (float(measured.max() / measured.min()), ">=", SPAN),
        "Spearman of predicted and measured": (float(spearmanr(predicted, measured).statistic), ">=", CORRELATION),
        "MAPE": (mape(predicted, measured), "<=", MAPE),
        "chosen / fastest": (float(measured[chosen] / measured.min()), "<=", REGRET),
    }
    spread = np.ptp(samples, axis=0) / measured
    lines = [f"{rows[0]['bed']}: {len(rows)} plans, {len(samples)} rounds, spread {np.median(spread):.0%} of a median"]
    for i in np.argsort(measured):
        mark = "  <- chosen" if i == chosen else ""
        lines.append(f"  {predicted[i]:8.3f} {measured[i]:8.3f} s  {rows[i]['name']}{mark}")
    for name, (value, sign, bound) in found.items():
        holds = value >= bound if sign == ">=" else value <= bound
        lines.append(f"  {name:<36} {value:6.3f}  {sign} {bound}  {'holds' if holds else 'FAILS'}")
    return "\n".join(lines), {name: value for name, (value, _, _) in found.items()}


def judge() -> None:
    """Print whether predictions hold, write judgement.json and plans.svg."""
    found, first = {}, None
    figure, axes = draw(4.5, 3.6)
    for name in BEDS:
        if not (FOLDER / f"{name}.json").exists():
            print(f"{name}: no rows")
            continue
        rows = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        text, found[name] = verdict(rows)
        print(text)
        anew = verdict(predicted_anew(name))[1]
        print("  predicted anew:", ", ".join(f"{what} {value:.3f}" for what, value in list(anew.items())[2:]))
        first = first or rows[0]
        points = [(np.median(row["measured_seconds"]), row["predicted_seconds"]) for row in rows]
        axes.plot(*zip(*points, strict=True), ".", label=name)
    if first is None:
        return
    ends = axes.get_xlim()
    axes.plot(ends, ends, "k-", linewidth=0.8)
    axes.set(xlabel="measured seconds of a step", ylabel="predicted", xscale="log", yscale="log")
    axes.legend(frameon=False)
    save(figure, first, FOLDER / "plans.svg")
    write_judgement(FOLDER / "judgement.json", found, *(FOLDER / f"{name}.json" for name in found))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"run": run, "worker": worker, "judge": judge})
