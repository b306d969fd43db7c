"""What ranks that share a whole graph send to each other, how equal their work is, and what a step takes.

    python -m bench.halo --root DATA                                  # counts, of all sets
    python -m bench.halo --root DATA --sets wordnet30 --seconds 2     # and steps of two processes, a core each

Counts are of pairs within one hop, as ``--batching full --hops 1 --top 0`` cuts them: rows of k and v that a rank
receives a layer, over all nodes N, beside (P - 1) / P of the ring; and the work of the rank that has most over the
mean, by ``data.full.row_costs``. A set may also be the folder of a store.

Steps are of HierarchicalGT, 2 layers, d = ffn = 128, 8 heads, 256 super nodes, dropout 0.1, fp32, on gloo: one to warm
up, then 7 rounds in which halo, allgather and the ring take turns, from barrier to barrier. All must end with the same
loss. Rows of a set go to bench/results/cpu/halo/SET.json.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.multiprocessing import start_processes

from bench.provenance import PACKAGE, write_rows
from bench.sparse_attention import SETS, graph_of
from megagraph.attention.module import BiasedRingAttention
from megagraph.config import TrainConfig
from megagraph.data.batch import Share
from megagraph.data.full import FullBatches, row_costs
from megagraph.epochs import make_optimizers, make_pipeline, own_share, train_step
from megagraph.evaluate import batches, make_loader, make_model
from megagraph.parallel.mesh import make_mesh
from megagraph.planner.plan import Plan

RANKS, WAYS, ROUNDS = (2, 4, 8), ("halo", "allgather", "ring"), 7
CONFIG = TrainConfig(
    batching="full",
    hops=1,
    top=0,
    layers=2,
    dim=128,
    ffn_dim=128,
    heads=8,
    super_nodes=257,
    dropout=0.1,
    input_dropout=0.1,
    attention_dropout=0.1,
    seed=0,
    device="cpu",
)


def counts(name: str, root: Path) -> dict[str, Any]:
    """Rows received and work of every rank, for each number of ranks."""
    builder = batches(CONFIG, graph_of(name, root))
    assert isinstance(builder, FullBatches)
    relation, N = builder.structure.relation, builder.graph.num_nodes
    starts, columns = relation.row_starts.numpy(), relation.columns.numpy()
    num_super = builder.sequence_nodes - N
    work = row_costs(np.diff(starts), num_super)
    row: dict[str, Any] = {"set": Path(name).name, "nodes": N, "pairs": len(columns), "unit": "rows received over N"}
    for world_size in RANKS:
        layouts = [builder.layout(N, num_super, Share(cp=world_size, cp_rank=rank)) for rank in range(world_size)]
        blocks = [layout.block() for layout in layouts]
        works = [int(work[block.start : block.stop].sum()) for block in blocks]
        row[f"ranks_{world_size}"] = {
            "halo": [rows / N for rows in builder.halo(world_size)],
            "ring": (world_size - 1) / world_size,
            "work": max(works) / np.mean(works),
        }
    return row


def steps(rank: int, world_size: int, folder: str, name: str, root: str) -> None:
    """One process of a group; rank 0 leaves the seconds of every way in the folder."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % 2]})
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(hours=1)
    )
    graph, device, plan = graph_of(name, Path(root)), torch.device("cpu"), Plan(cp=world_size, comm="halo")
    builder, mesh = batches(CONFIG, graph), make_mesh(plan, device)
    assert mesh is not None
    torch.manual_seed(0)
    sizes = dict(in_features=graph.in_features, num_classes=graph.num_classes, bias_size=builder.structure.size)
    loader = make_loader(CONFIG, builder, np.arange(graph.num_nodes), share=own_share(plan, mesh))
    batch = next(iter(loader.epoch(0)))
    trained = []
    for way in WAYS:
        torch.manual_seed(0)
        model = make_model(CONFIG, CONFIG.model_config(**sizes), mesh["cp"])
        pipeline = make_pipeline(model, Plan(cp=world_size, comm=way), mesh, device, CONFIG)
        assert {x.comm for x in model.modules() if isinstance(x, BiasedRingAttention)} == {way}
        pipeline.train()
        trained.append((pipeline, make_optimizers(pipeline, CONFIG)))
    keys = torch.zeros(1, dtype=torch.int32)
    seconds, losses = np.zeros((ROUNDS + 1, len(WAYS))), np.zeros((ROUNDS + 1, len(WAYS)))
    for round_ in range(ROUNDS + 1):
        for i in np.roll(np.arange(len(WAYS)), round_):
            dist.barrier()
            started = time.perf_counter()
            losses[round_, i], _ = train_step(*trained[i], batch, keys, CONFIG.clip_norm)
            dist.barrier()
            seconds[round_, i] = time.perf_counter() - started
    if rank == 0:
        np.savez(Path(folder) / "found.npz", seconds=seconds[1:], losses=losses)
    dist.destroy_process_group()


def timed(name: str, root: Path, world_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(steps, (world_size, folder, name, str(root)), nprocs=world_size, start_method="spawn")
        found = np.load(Path(folder) / "found.npz")
        seconds, losses = found["seconds"], found["losses"]
    assert np.ptp(losses, axis=1).max() < 1e-3, f"the ways do not compute the same: {losses}"
    row: dict[str, Any] = {"ranks": world_size, "unit": "s"}
    for i, way in enumerate(WAYS):
        own = seconds[:, i]
        row[way] = {"median": float(np.median(own)), "range": [own.min(), own.max()]}
    return row


def main(root: Path, sets: tuple[str, ...] = (*SETS, "tolokers"), seconds: tuple[int, ...] = ()) -> None:
    """Print the rows and write them.

    Args:
        seconds: of steps by so many processes, too.
    """
    for name in sets:
        row = counts(name, root)
        for world_size in RANKS:
            found = row[f"ranks_{world_size}"]
            print(
                f"{row['set']}, {row['pairs']:,} pairs, {world_size} ranks: receives at most {max(found['halo']):.3f} N"
                f", {np.mean(found['halo']):.3f} on average (ring {found['ring']:.3f}); most work {found['work']:.3f}",
                flush=True,
            )
        rows = [row]
        for world_size in seconds:
            timing = {"set": row["set"]} | timed(name, root, world_size)
            words = "{median:.3f} s ({range[0]:.3f} to {range[1]:.3f})"
            ways = ", ".join(f"{way} {words.format(**timing[way])}" for way in WAYS)
            print(f"{row['set']}, a step of {world_size} processes: {ways}", flush=True)
            rows.append(timing)
        print(write_rows(f"halo/{row['set']}", rows, folder="cpu", children=PACKAGE))


if __name__ == "__main__":
    tyro.cli(main)
