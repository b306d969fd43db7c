"""Memory and step time of four pipeline stages of a 24-layer model, split evenly and with a short first stage.

    OMP_NUM_THREADS=1 python -m bench.paper.pipeline_stages        # four processes, gloo, CPU
    python -m bench.paper.pipeline_stages --plot                   # the figure again, from its rows
    OMP_NUM_THREADS=1 python -m bench.paper.pipeline_stages --heavy    # a first stage of 602 to 16,384 columns, GPipe

Memory of a stage is the peak of the bytes of all tensors alive in its process over two training steps: weights,
gradients, AdamW's moments, batch, activations, messages, but for temporaries inside an operator. (torch's MemTracker
would count them, too, but follows one micro-batch only.) Beside it how far the resident memory of its process rose,
allocator included. Then steps are timed without counting, on every rank, from one barrier to the next. The losses of
all splits and schedules must agree.

Fixed: a graph of 2,000 nodes with 602 features (Reddit's), seed 0; HierarchicalGT of 24 layers, d = 128, 8 heads,
FFN 128, buckets, dropout 0.1; 4 sequences of 256 regular and 32 super nodes, K = 4; AdamW, fp32; GPipe and 1F1B;
1 warm-up and 6 timed steps, in processes of their own for every split and schedule.

Heavy: the same under GPipe with COLUMNS of features, both splits and the one that the planner finds, all in the same
four processes, whose steps take turns, 1 and HEAVY_STEPS. Counted are processor seconds of every stage: on machines of
their own the slowest sets the pace, and others on this one do not count. The planner's costs come from a profile of one
process at each of COLUMNS, in processor seconds, too, without links. Bytes of features follow from their columns: the
ones at which the split changes whose fullest stage has least are looked for in steps of FINEST.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from bench.paper.live_bytes import MIB, Rank
from bench.processes import forget_peak, peak_resident
from bench.provenance import PACKAGE, RESULTS, sized, write_rows
from bench.tables import draw, save
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph
from megagraph.planner import CostModel, fit, search
from megagraph.planner.measure import clock
from megagraph.planner.profile import profile

SPLITS = ("6,6,6,6", "3,7,7,7")
SCHEDULES = ("gpipe", "1f1b")
STAGES, WARMUP_STEPS = 4, 1
STEPS = sized(6, quick=1)
COLUMNS, HEAVY_STEPS, PROFILE_SECONDS = sized(((602, 4096, 16384), 3, 12.0), quick=((64, 2048), 1, 8.0))
FINEST, WIDEST = sized((128, 8192), quick=(1024, 8192))


def config_of(split: str, schedule: str) -> TrainConfig:
    return TrainConfig(
        batching="cluster",
        layers=24,
        dim=128,
        ffn_dim=128,
        heads=8,
        dropout=0.1,
        input_dropout=0.1,
        attention_dropout=0.1,
        batch_size=4,
        sequence_nodes=256,
        super_nodes=32,
        seed=0,
        device="cpu",
        plan=f"{STAGES},1,1",
        stage_layers=split,
        microbatches=4,
        schedule=schedule,
    )


def run_stage(config: TrainConfig) -> dict[str, Any]:
    """Train on this rank; its memory, and the time of every step."""
    graph = synthetic_graph(num_nodes=2000, num_classes=8, in_features=602, average_degree=10, seed=0)
    resident = forget_peak()
    rank, seconds = Rank(config, graph), []
    peak = rank.peak_bytes()
    for _ in range(WARMUP_STEPS + STEPS):
        dist.barrier()
        started = time.perf_counter()
        rank.step()
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    moments = [x for optimizer in rank.optimizers for state in optimizer.state.values() for x in state.values()]
    return {
        "losses": rank.losses,
        "seconds": seconds[WARMUP_STEPS:],
        "peak_bytes": peak,
        "batch_bytes": sum(value.nbytes for value in rank.batch.memory()),
        "state_bytes": sum(x.nbytes for x in moments) + 2 * sum(p.nbytes for p in rank.pipeline.parameters()),
        "resident_bytes": peak_resident() - resident,
    }


def _worker(rank: int, folder: str, split: str, schedule: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=STAGES, timeout=timeout)
    config = config_of(split, schedule)
    torch.save(run_stage(config), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure(split: str, schedule: str) -> tuple[list[dict[str, Any]], list[float]]:
    """A row per stage, and the losses."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, args=(folder, split, schedule), nprocs=STAGES)
        stages = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(STAGES)]
    rows = []
    for stage, result in enumerate(stages):
        rows.append(
            {
                "split": split,
                "schedule": schedule,
                "stage": stage,
                "peak_bytes": result["peak_bytes"],
                "resident_bytes": result["resident_bytes"],
                "batch_bytes": result["batch_bytes"],
                "state_bytes": result["state_bytes"],
                "step_seconds": result["seconds"],
                "median": float(np.median(result["seconds"])),
                "N": 288,
                "B": 4,
                "num_microbatches": 4,
                "dtype": "fp32",
                "unit": "s",
            }
        )
    peaks, resident = (", ".join(f"{row[name] / MIB:.1f}" for row in rows) for name in ("peak_bytes", "resident_bytes"))
    seconds = rows[0]["step_seconds"]
    print(f"{schedule}, {split}: peak {peaks} MiB; resident + {resident} MiB", end="; ")
    print(f"step {np.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})", flush=True)
    return rows, stages[0]["losses"]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Peak of every stage, the two splits side by side, a panel for each schedule."""
    figure, panels = draw(7.5, 3.2, columns=len(SCHEDULES))
    for axes, schedule in zip(panels, SCHEDULES, strict=True):
        for offset, split in zip((-0.2, 0.2), SPLITS, strict=True):
            bars = [row for row in rows if (row["split"], row["schedule"]) == (split, schedule)]
            places = [row["stage"] + offset for row in bars]
            axes.bar(places, [row["peak_bytes"] / MIB for row in bars], width=0.38, label=f"layers {split}")
        axes.set(xlabel="stage", xticks=range(STAGES), title=schedule)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    panels[0].set_ylabel("peak of live tensors, MiB")
    save(figure, rows[0], path)


# ---- a heavy first stage


def profiled(columns: int) -> CostModel:
    """Cost model of this machine, in processor seconds."""
    graph = synthetic_graph(num_nodes=2000, num_classes=8, in_features=columns, average_degree=10, seed=0)
    rank = Rank(replace(config_of(SPLITS[0], "gpipe"), plan="1,1,1", stage_layers=None), graph)
    model = rank.pipeline.stages[0].model.config
    with patch.object(clock.time, "perf_counter", time.process_time):
        cost = fit(profile(model, rank.workload(), device=torch.device("cpu"), budget_seconds=PROFILE_SECONDS))
    return replace(cost, memory={name: x for name, x in cost.memory.items() if name != "process.byte"})


def found_by(cost: CostModel, columns: int) -> dict[str, Any]:
    """The splits of least seconds and of least bytes, and the bytes of the fullest stage of those that are measured."""
    model = replace(cost.profiled()[0], in_features=columns)
    gpipe = {"pp": STAGES, "cp": 1, "dp": 1, "schedule": "gpipe", "num_microbatches": 4, "checkpoint": False}
    result = search(cost, model, STAGES, 2.0**40, fixed=gpipe)  # a limit, or it seeks no lightest
    lightest = min(result.candidates, key=lambda candidate: candidate.peak_bytes)
    splits = {"seconds": result.best.plan.layers, "bytes": lightest.plan.layers}
    plans = {split: config_of(split, "gpipe").parallel_plan() for split in SPLITS}
    least = {split: max(cost.memory_bytes(model, plan)) for split, plan in plans.items()}
    return {name: ",".join(map(str, layers)) for name, layers in splits.items()} | {"predicted_bytes": least}


def _heavy_worker(rank: int, folder: str, splits: dict[int, tuple[str, ...]]) -> None:
    torch.set_num_threads(1)
    timeout, rendezvous = timedelta(hours=1), f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=STAGES, timeout=timeout)
    found = {}
    for columns, of in splits.items():
        graph = synthetic_graph(num_nodes=2000, num_classes=8, in_features=columns, average_degree=10, seed=0)
        ranks = {split: Rank(config_of(split, "gpipe"), graph) for split in of}
        peaks = {split: own.peak_bytes() for split, own in ranks.items()}
        seconds: dict[str, list[float]] = {split: [] for split in of}
        for _ in range(WARMUP_STEPS + HEAVY_STEPS):
            for split, own in ranks.items():
                dist.barrier()
                started = time.process_time()
                own.step()
                seconds[split].append(time.process_time() - started)
        for split, own in ranks.items():
            found[columns, split] = {"peak_bytes": peaks[split], "cpu_seconds": seconds[split][WARMUP_STEPS:]}
            found[columns, split]["losses"] = own.losses
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def measure_heavy() -> None:
    """Print, and write bench/results/cpu/pipeline_stages/heavy.json."""
    costs = {columns: profiled(columns) for columns in COLUMNS}
    planned = {columns: found_by(cost, columns) for columns, cost in costs.items()}
    chosen = {columns: tuple(dict.fromkeys((*SPLITS, planned[columns]["seconds"]))) for columns in COLUMNS}
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_heavy_worker, args=(folder, chosen), nprocs=STAGES)
        stages = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(STAGES)]
    rows: list[dict[str, Any]] = []
    for columns, splits in chosen.items():
        losses = [stages[0][columns, split]["losses"] for split in splits]
        assert np.ptp(np.array(losses), axis=0).max() < 1e-4, "the splits do not compute the same"
        for split in splits:
            of = [stage[columns, split] for stage in stages]
            row = {"columns": columns, "split": split, "planned": split == planned[columns]["seconds"]}
            row |= {name: [stage[name] for stage in of] for name in ("peak_bytes", "cpu_seconds")}
            row["slowest_seconds"] = max(float(np.median(stage["cpu_seconds"])) for stage in of)
            row["predicted_bytes"] = planned[columns]["predicted_bytes"].get(split)
            row["held_out"] = costs[columns].held_out
            rows.append(row | {"unit": "s"})
            peaks = ", ".join(f"{size / MIB:.1f}" for size in row["peak_bytes"])
            part = row["slowest_seconds"] / by_split(rows, columns, SPLITS[0])["slowest_seconds"]
            print(f"{columns} columns, {split}: peak {peaks} MiB; slowest stage {part:.2f} of the even split's")
    every = {columns: found_by(costs[COLUMNS[-1]], columns) for columns in range(FINEST, WIDEST + 1, FINEST)}
    changes: dict[int, str] = {}
    for columns, found in every.items():
        if not changes or found["bytes"] != [*changes.values()][-1]:
            changes[columns] = found["bytes"]
    light = [columns for columns, found in every.items() if max(SPLITS, key=found["predicted_bytes"].get) == SPLITS[0]]
    print(f"least bytes: {changes}; {SPLITS[1]} has less than {SPLITS[0]} from {min(light)} columns on")
    rows.append({"lightest_from": changes, "short_is_lighter_from": min(light), "unit": "columns"})
    write_rows("pipeline_stages/heavy", rows, folder="cpu", children=PACKAGE)


def by_split(rows: list[dict[str, Any]], columns: int, split: str) -> dict[str, Any]:
    return next(row for row in rows if (row["columns"], row["split"]) == (columns, split))


def main(plot_only: Annotated[bool, tyro.conf.arg(name="plot")] = False, heavy: bool = False) -> None:
    """Print, and write bench/results/cpu/pipeline_stages/stages.json and .svg, or only draw the rows that are there.

    Args:
        heavy: instead, heavy.json there.
    """
    if heavy:
        torch.set_num_threads(1)
        return measure_heavy()
    folder = RESULTS / "cpu" / "pipeline_stages"
    if not plot_only:
        torch.set_num_threads(1)
        rows, losses = [], []
        for schedule in SCHEDULES:
            for split in SPLITS:
                of_split, loss = measure(split, schedule)
                rows += of_split
                losses.append(loss)
        assert np.ptp(np.array(losses), axis=0).max() < 1e-4, "the splits do not compute the same"
        write_rows("pipeline_stages/stages", rows, folder="cpu", children=PACKAGE)
    plot(json.loads((folder / "stages.json").read_text()), folder / "stages.svg")


if __name__ == "__main__":
    tyro.cli(main)
