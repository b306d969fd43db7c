"""CPU seconds that a rank takes to build its share of a batch: the same for any dp, and less for a later stage?

    python -m bench.shares

Ego batches of 32 targets a rank, with channels and with buckets, on generated graphs of 20,000 nodes, whose candidates
are kept, and of 100,000, whose are found anew for each target; cluster batches of 4 sequences a rank on one of 300,000,
which are 64 ranks' and more. A batch grows with dp, so that a rank always has as much. Shares take turns on the same
items, in one thread of one process. A later stage of a pipeline builds no features.

Fixed: seed 0, 256 features, average degree 10, 8 samples of 14 nodes, sequences of 1,024 regular and 64 super nodes,
ROUNDS builds of each after one that does not count; process time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import tyro

from bench.provenance import write_rows
from megagraph.data.batch import Share
from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare

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
    "later stage": Share(embeds=False),
}


def measure(nodes: int, name: str) -> dict[str, Any]:
    """A row: CPU seconds of every share."""
    targets, options = BATCHES[name]
    graph = synthetic_graph(num_nodes=nodes, num_classes=8, in_features=FEATURES, average_degree=10, seed=SEED)
    builder = prepare(graph, options)
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
    medians = {label: float(np.median(values[1:])) for label, values in seconds.items()}
    row = {"batches": name, "nodes": nodes, "unit": "s", "seconds": {k: v[1:] for k, v in seconds.items()}}
    same, later = medians["dp 64"] / medians["dp 1"], medians["later stage"] / medians["dp 1"]
    verdicts = ("holds" if value <= bound else "FAILS" for value, bound in ((same, SAME), (later, LATER)))
    print(
        f"{name}, {nodes:,} nodes: "
        + ", ".join(f"{label} {value * 1e3:.1f} ms" for label, value in medians.items())
        + f"; dp 64 {same:.2f} of dp 1 {next(verdicts)}, later {later:.2f} of first {next(verdicts)}",
        flush=True,
    )
    return row | {"median": medians, "dp_64_of_dp_1": same, "later_of_first": later}


def main() -> None:
    """Print, and write bench/results/cpu/data/shares.json."""
    torch.set_num_threads(1)
    print(
        write_rows(
            "data/shares", [measure(nodes, name) for name, sizes in NODES.items() for nodes in sizes], folder="cpu"
        )
    )


if __name__ == "__main__":
    tyro.cli(main)
