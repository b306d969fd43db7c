"""Memory and step time of four pipeline stages of a 24-layer model, split evenly and with a short first stage.

    OMP_NUM_THREADS=1 python -m bench.paper.pipeline_stages        # four processes, gloo, CPU
    python -m bench.paper.pipeline_stages --plot                   # the figure again, from its rows

Memory of a stage is the peak of the bytes of all tensors alive in its process over two training steps: weights,
gradients, AdamW's moments, batch, activations, messages, but for temporaries inside an operator. (torch's MemTracker
would count them, too, but follows one micro-batch only.) Beside it how far the resident memory of its process rose,
allocator included. Then steps are timed without counting, on every rank, from one barrier to the next. The losses of
all splits and schedules must agree.

Fixed: a graph of 2,000 nodes with 602 features (Reddit's), seed 0; HierarchicalGT of 24 layers, d = 128, 8 heads,
FFN 128, buckets, dropout 0.1; 4 sequences of 256 regular and 32 super nodes, K = 4; AdamW, fp32; GPipe and 1F1B;
1 warm-up and 6 timed steps, in processes of their own for every split and schedule.
"""

from __future__ import annotations

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from bench.paper.live_bytes import MIB, Rank
from bench.processes import peak_resident
from bench.provenance import PACKAGE, RESULTS, sized, write_rows
from bench.tables import draw, save
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph

SPLITS = ("6,6,6,6", "3,7,7,7")
SCHEDULES = ("gpipe", "1f1b")
STAGES, WARMUP_STEPS = 4, 1
STEPS = sized(6, quick=1)


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
    resident = psutil.Process().memory_info().rss
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


def main(plot_only: Annotated[bool, tyro.conf.arg(name="plot")] = False) -> None:
    """Print, and write bench/results/cpu/pipeline_stages/stages.json and .svg, or only draw the rows that are there."""
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
