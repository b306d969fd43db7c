"""What ranks that share a whole graph send to each other, how equal their work is, and what a step takes.

    python -m bench.halo --root DATA                                  # counts, of all sets
    python -m bench.halo --root DATA --sets wordnet30 --seconds 2     # and steps of two processes, a core each
    python -m bench.halo --root DATA --sets computers --dense 2 4     # steps where all pairs of a cluster batch attend

Counts are of pairs within one hop, as ``--batching full --hops 1 --top 0`` cuts them: rows of k and v that a rank
receives a layer, over all nodes N, beside (P - 1) / P of the ring; and the work of the rank that has most over the
mean, by ``data.full.row_costs``. A set may also be the folder of a store.

Steps are of HierarchicalGT, 2 layers, d = ffn = 128, 8 heads, 256 super nodes, dropout 0.1, fp32, on gloo: one to warm
up, then 7 rounds in which halo, allgather, the ring and ulysses take turns, from barrier to barrier. All must end with
the same loss. Dense ones are of cluster batches, 4 sequences of 1,024 nodes and at most 65 super nodes, by buckets and
by 4 channels. Beside seconds stand bytes of the first rank: sent to others of its sequence in a step, kept for
backward, and of the batch's bias. Rows of a set go to bench/results/cpu/halo/SET.json, dense ones to SET-dense.json.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch.multiprocessing import start_processes

from bench.provenance import PACKAGE, write_rows
from bench.resume import merged
from bench.sparse_attention import SETS, graph_of
from megagraph.attention.bias import BorderedData
from megagraph.attention.exchange import GroupExchange
from megagraph.attention.module import BiasedRingAttention
from megagraph.config import TrainConfig
from megagraph.data.batch import Batch, Share
from megagraph.data.full import FullBatches, row_costs
from megagraph.evaluate import batches, make_loader, make_model
from megagraph.parallel.mesh import make_mesh
from megagraph.planner.plan import Plan
from megagraph.train_step import make_optimizers, make_pipeline, own_share, train_step

RANKS, WAYS, ROUNDS = (2, 4, 8), ("halo", "allgather", "ring", "ulysses"), 7
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
_DENSE = replace(CONFIG, batching="cluster", sequence_nodes=1024, super_nodes=65, batch_size=4, channels=4)
CONFIGS = {"pairs": CONFIG} | {bias: replace(_DENSE, bias=bias) for bias in ("bucket", "projected")}


def ways_of(kind: str) -> tuple[str, ...]:
    return WAYS if kind == "pairs" else WAYS[1:]


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


class Counted:
    """Bytes that a rank sends while this is entered."""

    def __enter__(self) -> Counted:
        self.bytes, send = 0, GroupExchange._send

        def counted(exchange: GroupExchange, to: dict[int, torch.Tensor], of: dict[int, torch.Tensor]) -> Any:
            self.bytes += sum(part.nbytes for part in to.values())
            return send(exchange, to, of)

        self._patch = patch.object(GroupExchange, "_send", counted)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def bias_of(batch: Batch) -> list[torch.Tensor]:
    data = batch.structure
    return data.tensors if isinstance(data, BorderedData) else [data]


def first_step(trained: tuple, batch: Batch, keys: torch.Tensor) -> tuple[float, dict[str, int]]:
    """The loss, and bytes of a step."""
    kept: dict[int, int] = {}
    there = (*trained[0].parameters(), *batch.memory())
    given = {x.untyped_storage().data_ptr() for x in there}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in given:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with Counted() as sent, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss, _ = train_step(*trained, batch, keys, CONFIG.clip_norm)
    found = {"sent": sent.bytes, "kept": sum(kept.values()), "bias": sum(x.nbytes for x in bias_of(batch))}
    return loss, {f"{name}_bytes": value for name, value in found.items()}


def steps(rank: int, world_size: int, folder: str, name: str, root: str, kind: str) -> None:
    """One process of a group; rank 0 leaves what it found of every way in the folder."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % 2]})
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(hours=1)
    )
    config, ways = CONFIGS[kind], ways_of(kind)
    graph, device = graph_of(name, Path(root)), torch.device("cpu")
    builder, mesh = batches(config, graph), make_mesh(Plan(cp=world_size), device)
    assert mesh is not None
    sizes = dict(in_features=graph.in_features, num_classes=graph.num_classes, bias_size=builder.structure.size)
    trained, given = [], []
    for way in ways:
        torch.manual_seed(0)
        plan = Plan(cp=world_size, comm=way)
        loader = make_loader(config, builder, np.arange(graph.num_nodes), share=own_share(plan, mesh))
        given.append(next(iter(loader.epoch(0))))
        model = make_model(config, config.model_config(**sizes), mesh["cp"])
        pipeline = make_pipeline(model, plan, mesh, device, config)
        assert {x.comm for x in model.modules() if isinstance(x, BiasedRingAttention)} == {way}
        pipeline.train()
        trained.append((pipeline, make_optimizers(pipeline, config)))
    keys = torch.zeros(given[0].batch_size, dtype=torch.int32)
    seconds, losses = np.zeros((ROUNDS + 1, len(ways))), np.zeros((ROUNDS + 1, len(ways)))
    taken: list[dict[str, int]] = [{}] * len(ways)
    for round_ in range(ROUNDS + 1):
        for i in np.roll(np.arange(len(ways)), round_):
            dist.barrier()
            started = time.perf_counter()
            if round_ == 0:
                losses[round_, i], taken[i] = first_step(trained[i], given[i], keys)
            else:
                losses[round_, i], _ = train_step(*trained[i], given[i], keys, config.clip_norm)
            dist.barrier()
            seconds[round_, i] = time.perf_counter() - started
    if rank == 0:
        assert np.ptp(losses, axis=1).max() < 1e-3, f"the ways do not compute the same: {losses}"
        found = {way: {"seconds": seconds[1:, i].tolist(), **taken[i]} for i, way in enumerate(ways)}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def timed(name: str, root: Path, world_size: int, kind: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        start_processes(steps, (world_size, folder, name, str(root), kind), nprocs=world_size, start_method="spawn")
        found = json.loads((Path(folder) / "found.json").read_text())
    row: dict[str, Any] = {"ranks": world_size, "kind": kind, "unit": "s"}
    for way, taken in found.items():
        own = taken.pop("seconds")
        row[way] = {"median": float(np.median(own)), "range": [min(own), max(own)]} | taken
        print(
            "{name}, {kind}, a step of {ranks} processes by {way}: {median:.3f} s ({low:.3f} to {high:.3f}); sent "
            "{sent_bytes:,}, kept {kept_bytes:,}, bias {bias_bytes:,} bytes".format(
                name=Path(name).name, kind=kind, ranks=world_size, way=way, low=min(own), high=max(own), **row[way]
            ),
            flush=True,
        )
    return row


def main(
    root: Path,
    sets: tuple[str, ...] = (*SETS, "tolokers"),
    seconds: tuple[int, ...] = (),
    dense: tuple[int, ...] = (),
) -> None:
    """Print the rows and write them.

    Args:
        seconds: of steps by so many processes, too.
        dense: instead, of steps by so many where all pairs attend.
    """
    for name in sets:
        own = Path(name).name
        if dense:
            kinds = (kind for kind in CONFIGS if kind != "pairs")
            rows = [{"set": own} | timed(name, root, ranks, kind) for ranks, kind in product(dense, kinds)]
            write(f"{own}-dense", rows)
            continue
        row = counts(name, root)
        for world_size in RANKS:
            found = row[f"ranks_{world_size}"]
            print(
                f"{row['set']}, {row['pairs']:,} pairs, {world_size} ranks: receives at most {max(found['halo']):.3f} N"
                f", {np.mean(found['halo']):.3f} on average (ring {found['ring']:.3f}); most work {found['work']:.3f}",
                flush=True,
            )
        rows = [row] + [{"set": own} | timed(name, root, ranks, "pairs") for ranks in seconds]
        write(own, rows)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """Beside rows of other numbers of ranks that are there."""
    every = merged(f"halo/{name}", rows, "ranks", "kind", folder="cpu")
    print(write_rows(f"halo/{name}", every, folder="cpu", children=PACKAGE))


if __name__ == "__main__":
    tyro.cli(main)
