"""CPU seconds that a rank takes to build its share of a batch: the same for any dp, and less for a later stage?

    python -m bench.shares

Ego batches of 32 targets a rank, with channels and with buckets, on generated graphs of 20,000 nodes, whose candidates
are kept, and of 100,000, whose are found anew for each target; cluster batches of 4 sequences a rank on one of 300,000,
which are 64 ranks' and more. A batch grows with dp, so that a rank always has as much. Shares take turns on the same
items, in one thread of one process. A later stage of a pipeline builds no features where it is alone on its node; where
it is not, a second process gets the batches from the first, which then sends them, too. Ranks that share sequences
build their own rows each: in sum as much as one, and what that is above it is what one build for all could spare.

Fixed: seed 0, 256 features, average degree 10, 8 samples of 14 nodes, sequences of 1,024 regular and 64 super nodes,
ROUNDS builds of each after one that does not count; process time.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro

from bench.provenance import write_rows
from megagraph.data.batch import Share
from megagraph.data.build import Builder
from megagraph.data.datasets import synthetic_graph
from megagraph.data.loader import Loader
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.parallel.delivery import NodeLoader

SEED, ROUNDS, FEATURES = 0, 9, 256
SAME, LATER = 1.1, 0.5  # of dp = 1, of the first stage, at most
NODES = {"ego, channels": (20_000, 100_000), "ego, buckets": (20_000, 100_000), "cluster": (300_000,)}
BATCHES = {
    "ego, channels": (32, BatchOptions(sample_nodes=14, samples=8)),
    "ego, buckets": (32, BatchOptions(sample_nodes=14, samples=8, bias="bucket")),
    "cluster": (4, BatchOptions(batching="cluster", bias="bucket", sequence_nodes=1024, super_nodes=64)),
}
SHARES = {
    "dp 1": Share(),
    "dp 8": Share(dp=8, dp_rank=5),
    "dp 64": Share(dp=64, dp_rank=37),
    "cp 2": Share(cp=2, cp_rank=1),
    "cp 4": Share(cp=4, cp_rank=2),
    "later stage, alone": Share(embeds=False),
}


def delivered(builder: Builder, targets: int) -> list[list[float]]:
    """CPU seconds of a batch on the rank that builds and sends it, and on the one that receives it."""
    loader = Loader(builder, np.arange(builder.graph.num_nodes), batch_size=targets, seed=SEED, shuffle=True)
    seconds, started = [], time.process_time()
    for _ in islice(NodeLoader(loader, dist.group.WORLD).epoch(0), ROUNDS + 1):
        seconds.append(time.process_time() - started)
        started = time.process_time()
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, seconds)
    return everyone


def measure(builder: Builder, nodes: int, name: str) -> dict[str, list[float]]:
    """CPU seconds of every share."""
    targets, _ = BATCHES[name]
    everyone, mask = np.arange(nodes), np.ones(nodes, bool)
    items = {
        dp: builder.plan(everyone, targets * dp, np.random.default_rng(SEED))
        for dp in sorted({share.dp for share in SHARES.values()})
    }
    assert all(len(of_dp[0]) == targets * dp for dp, of_dp in items.items()), "the graph is too small for 64 ranks"
    seconds: dict[str, list[float]] = {share: [] for share in SHARES}
    for round_ in range(ROUNDS + 1):
        for label, share in SHARES.items():
            full = [item for item in items[share.dp] if len(item) == targets * share.dp]
            item = full[round_ % len(full)]
            started = time.process_time()
            builder.build(item, mask, np.random.default_rng(round_), share)
            seconds[label].append(time.process_time() - started)
    return seconds


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = []
    for name, sizes in NODES.items():
        targets, options = BATCHES[name]
        for nodes in sizes:
            graph = synthetic_graph(num_nodes=nodes, num_classes=8, in_features=FEATURES, average_degree=10, seed=SEED)
            builder = prepare(graph, options)
            sends, receives = delivered(builder, targets)
            if rank == 0:
                seconds = measure(builder, nodes, name) | {"first stage, sends": sends, "later stage": receives}
                rows.append(row_of(name, nodes, {label: values[1:] for label, values in seconds.items()}))
            dist.barrier()
    if rank == 0:
        print(write_rows("data/shares", rows, folder="cpu"))
    dist.destroy_process_group()


def row_of(name: str, nodes: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    medians = {label: float(np.median(values)) for label, values in seconds.items()}
    in_sum = 4 * medians["cp 4"] / medians["dp 1"]
    same, later = medians["dp 64"] / medians["dp 1"], medians["later stage"] / medians["dp 1"]
    verdicts = ("holds" if value <= bound else "FAILS" for value, bound in ((same, SAME), (later, LATER)))
    print(
        f"{name}, {nodes:,} nodes: "
        + ", ".join(f"{label} {value * 1e3:.1f} ms" for label, value in medians.items())
        + f"; all of cp 4 {in_sum:.2f} of dp 1"
        + f"; dp 64 {same:.2f} of dp 1 {next(verdicts)}, later {later:.2f} of first {next(verdicts)}",
        flush=True,
    )
    row = {"batches": name, "nodes": nodes, "unit": "s", "seconds": seconds, "median": medians}
    return row | {"dp_64_of_dp_1": same, "later_of_first": later, "cp_4_in_sum": in_sum}


def main() -> None:
    """Print, and write bench/results/cpu/data/shares.json."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, args=(folder,), nprocs=2)


if __name__ == "__main__":
    tyro.cli(main)
