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
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.processes import peak_resident
from bench.provenance import PACKAGE, RESULTS, sized, write_rows
from bench.tables import draw, save
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph
from megagraph.epochs import make_optimizers, make_pipeline, own_share, train_step
from megagraph.evaluate import batches, make_loader
from megagraph.models.hierarchical import HierarchicalGT
from megagraph.parallel.mesh import make_mesh
from megagraph.planner.plan import Plan

SPLITS = ("6,6,6,6", "3,7,7,7")
SCHEDULES = ("gpipe", "1f1b")
STAGES, TRACKED_STEPS, WARMUP_STEPS = 4, 2, 1
STEPS = sized(6, quick=1)
MIB = 2**20


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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators return, and of those it is given, while they live."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}
        self._count(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._count(tree_leaves(result))
        return result

    def _count(self, values) -> None:
        for value in values:
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known[key] = weakref.ref(storage, lambda _, key=key, size=size: self._forget(key, size))
                self.live += size
                self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def run_stage(config: TrainConfig, plan: Plan) -> dict[str, Any]:
    """Train on this rank; its memory, and the time of every step."""
    device = torch.device("cpu")
    graph = synthetic_graph(num_nodes=2000, num_classes=8, in_features=602, average_degree=10, seed=0)
    builder = batches(config, graph)
    resident = psutil.Process().memory_info().rss
    mesh = make_mesh(plan, device)
    torch.manual_seed(0)
    model_config = config.model_config(in_features=602, num_classes=8, bias_size=builder.structure.size)
    pipeline = make_pipeline(HierarchicalGT(model_config), plan, mesh, device, config)
    pipeline.train()
    optimizers = make_optimizers(pipeline, config)
    loader = make_loader(config, builder, np.arange(graph.num_nodes), shuffle=True, share=own_share(plan, mesh))
    batch = next(iter(loader.epoch(0)))
    losses, seconds = [], []

    def step() -> None:
        if plan.pp > 1:
            dist.barrier()
        started = time.perf_counter()
        keys = dropout_keys(0, len(losses), batch.sequence_ids)
        losses.append(train_step(pipeline, optimizers, batch, keys, config.clip_norm)[0])
        if plan.pp > 1:
            dist.barrier()
        seconds.append(time.perf_counter() - started)

    fields = (getattr(batch, name) for name in batch.__slots__)
    given = [value for value in fields if isinstance(value, torch.Tensor)] + pipeline.parameters()
    with LiveBytes(*given) as counted:
        for _ in range(TRACKED_STEPS):
            step()
    for _ in range(WARMUP_STEPS + STEPS):
        step()
    moments = [x for optimizer in optimizers for state in optimizer.state.values() for x in state.values()]
    return {
        "losses": losses,
        "seconds": seconds[TRACKED_STEPS + WARMUP_STEPS :],
        "peak_bytes": counted.peak,
        "batch_bytes": sum(value.nbytes for value in given[: -len(pipeline.parameters())]),
        "state_bytes": sum(x.nbytes for x in moments) + 2 * sum(p.nbytes for p in pipeline.parameters()),
        "resident_bytes": peak_resident() - resident,
    }


def _worker(rank: int, folder: str, split: str, schedule: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=300)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=STAGES, timeout=timeout)
    config = config_of(split, schedule)
    torch.save(run_stage(config, config.parallel_plan()), Path(folder) / f"{rank}.pt")
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
