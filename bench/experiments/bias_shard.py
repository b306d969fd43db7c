"""Who builds the bias rows of a batch in a pipeline: every rank its own, or one, which broadcasts them over pp?

    OMP_NUM_THREADS=1 python -m bench.experiments.bias_shard

Two stages of one pipeline, a process each, gloo. ``rebuild``: both build at once. ``broadcast``: the first builds, then
broadcasts. Seconds until both ranks have the rows, from one barrier to the next, in turn; ``transfer`` is what of the
broadcast follows the build. The rows must be the same.

Fixed: a graph of 20,000 nodes, average degree 10, seed 0; ANS-GT's ego batches (32 targets of 8 samples, 14 sampled
nodes, super node, global token, 6 powers), and 4 cluster sequences of 1,024 nodes and 64 super nodes, with buckets and
with 6 powers; 2 warm-up rounds, 11 rounds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from torch import Tensor

from bench.provenance import write_rows
from megagraph.config import TrainConfig
from megagraph.data.datasets import synthetic_graph
from megagraph.data.graph import Graph
from megagraph.evaluate import batches, make_loader

STAGES, WARMUP_ROUNDS, ROUNDS = 2, 2, 11
CASES: dict[str, dict[str, Any]] = {
    "ego, projected": dict(batching="ego"),
    "cluster, bucket": dict(batching="cluster", batch_size=4, sequence_nodes=1024, super_nodes=64),
    "cluster, projected": dict(batching="cluster", batch_size=4, sequence_nodes=1024, super_nodes=64, bias="projected"),
}


def builder_of(graph: Graph, changes: dict[str, Any]) -> Callable[[], Tensor]:
    """What builds the rows of the first batch, [b, ...], again and again."""
    config = TrainConfig(device="cpu", **changes)
    builder = batches(config, graph)
    build = builder.structure.build
    with patch.object(builder.structure, "build", side_effect=build) as built:
        next(iter(make_loader(config, builder, np.arange(graph.num_nodes)).epoch(0)))
    return partial(build, *built.call_args.args)


def measure(build: Callable[[], Tensor]) -> dict[str, Any]:
    """Seconds of every way, median and range over the rounds; collective."""
    rows = build()
    own = torch.empty_like(rows.contiguous())

    def broadcast() -> float:
        x = build().contiguous() if dist.get_rank() == 0 else own
        built = time.perf_counter()
        dist.broadcast(x, src=0)
        return time.perf_counter() - built

    seconds: dict[str, list[float]] = {"rebuild": [], "broadcast": [], "transfer": []}
    for round_ in range(WARMUP_ROUNDS + ROUNDS):
        for name, way in sorted({"rebuild": build, "broadcast": broadcast}.items(), reverse=bool(round_ % 2)):
            dist.barrier()
            started = time.perf_counter()
            result = way()
            dist.barrier()
            taken = time.perf_counter() - started
            assert name == "rebuild" or dist.get_rank() == 0 or torch.equal(own, rows), "ranks have different rows"
            if round_ >= WARMUP_ROUNDS:
                seconds[name].append(taken)
                if name == "broadcast":
                    seconds["transfer"].append(float(result))
    return {"bytes": rows.nbytes, "shape": list(rows.shape), "dtype": str(rows.dtype)} | {
        name: {"median": float(np.median(values)), "range": [min(values), max(values)]}
        for name, values in seconds.items()
    }


def worker(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(minutes=5)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=STAGES, timeout=timeout)
    graph = synthetic_graph(num_nodes=20_000, average_degree=10, seed=0)
    rows = [{"case": name, "pp": STAGES, "unit": "s"} | measure(builder_of(graph, x)) for name, x in CASES.items()]
    if rank == 0:
        for row in rows:
            rebuild, broadcast, transfer = (row[name]["median"] * 1e3 for name in ("rebuild", "broadcast", "transfer"))
            print(
                f"{row['case']:18} {row['bytes'] / 2**20:5.1f} MiB: rebuild {rebuild:.1f} ms, broadcast "
                f"{broadcast:.1f} ms, of which transfer {transfer:.1f} ms"
            )
        print(write_rows("bias_shard", rows, folder="cpu"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Print and write the rows bench/results/cpu/bias_shard.json."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(f"file://{Path(folder) / 'rendezvous'}",), nprocs=STAGES)


if __name__ == "__main__":
    tyro.cli(main)
