"""A graph of the size of ogbn-products: generated, coarsened by METIS and by label propagation, and trained on.

    python -m bench.paper.products_size --folder FOLDER --step generate
    python -m bench.paper.products_size --folder FOLDER --step propagation
    python -m bench.paper.products_size --folder FOLDER --step metis
    python -m bench.paper.products_size --folder FOLDER --step train
    python -m bench.paper.products_size --folder FOLDER --step first-step
    python -m bench.paper.products_size --folder FOLDER --step full

``train`` compares the memory after 20 and after 100 steps. ``first-step`` takes the seconds from the start of
``megagraph train`` to the first line of its metrics.jsonl, twice: with what Numba compiled before, and with an empty
cache of Numba's; the store's cache is as ``train`` left it. Both train on cluster batches of one sequence, with one
loader worker. CPU seconds are of the whole tree: on a busy machine they bound what the clock would show on an idle one.
``full`` takes the whole graph as one sequence: clusters, pairs within one hop and their lists, without what is kept in
the store and then with it, and the first training step of ``megagraph train``, with and without ``--checkpoint``.
Settings are fixed. Memory is that of the process tree, see bench.processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from bench.processes import Child, run
from bench.provenance import PACKAGE, sized, write_rows

NODES, EDGES, CLUSTERS = sized((2_449_029, 61_859_140, 8192), quick=(50_000, 500_000, 256))
FEATURES, CLASSES, SEED = 100, 47, 0
SUPER_NODES = 255
SEQUENCE = sized({"sequence_nodes": 4096, "super_nodes": 256}, quick={"sequence_nodes": 512, "super_nodes": 32})
TRAIN = {"batching": "cluster", **SEQUENCE, "batch_size": 1, "workers": 1}
FULL = {"batching": "full", "hops": 1, "top": 0, "layers": 2, "dim": 64, "ffn_dim": 64, "heads": 8, "super_nodes": 257}
LARGER = {"layers": 4, "dim": 128, "ffn_dim": 128, "gpu_bytes": 141 * 10**9}
FULL_LISTS = {"limit_seconds": 900, "limit_bytes": 16 * 2**30, "again_limit_seconds": 20}
FULL_STEP = {"limit_seconds": 600, "limit_bytes": 22 * 2**30}  # of the step; of all that the process has then
FIRST_STEP_SECONDS = 60  # at most
(EARLY_STEP, LATE_STEP), GROWTH_BYTES = sized((20, 100), quick=(2, 4)), 50_000_000  # of USS in between, at most

Method = Literal["propagation", "metis"]
Step = Literal["generate", "propagation", "metis", "first-step", "train", "full"]


def main(folder: Path, step: Step, child: bool = False) -> None:
    """Run one step in a process of its own and write its rows; ``child`` is that process."""
    if child:
        assert step not in ("generate", "first-step", "train")
        print(json.dumps(_lists(folder) if step == "full" else _coarsen(folder, step)))
        return
    if step == "full":
        rows = _full(folder)
    else:
        rows = _train(folder, step) if step in ("first-step", "train") else _build(folder, step)
    print(json.dumps(rows, indent=1))
    print(write_rows(f"products_size/{step}", rows, children=PACKAGE))


def _build(folder: Path, step: str) -> list[dict[str, Any]]:
    if step == "generate":
        sizes = {"nodes": NODES, "edges": EDGES, "features": FEATURES, "classes": CLASSES, "seed": SEED}
        flags = [f"--{name}={value}" for name, value in sizes.items()]
        command = ["-m", "megagraph", "data", "generate", f"--out={folder}", *flags]
    else:
        sizes = {"clusters_wanted": CLUSTERS, "super_nodes_wanted": SUPER_NODES}
        command = ["-m", "bench.paper.products_size", f"--folder={folder}", f"--step={step}", "--child"]
    said, measured = run(*command)
    print(said)
    row = {"step": step, **sizes, **measured}
    if step == "generate":
        return [row | json.loads((folder / "header.json").read_text())["notes"]]
    return [row | json.loads(said.splitlines()[-1])]


def _train(folder: Path, step: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as empty:
        if step == "train":
            growth = {"growth_limit_bytes": GROWTH_BYTES}
            return [{"step": step, **TRAIN, **growth} | _steps(folder, {}, LATE_STEP, TRAIN)]
        cached = sorted(path.name for path in (folder / "cache").glob("*.npy"))
        fixed = {**TRAIN, "cached": cached, "limit_seconds": FIRST_STEP_SECONDS}
        return [
            {"step": step, "jit": jit, **fixed} | _steps(folder, environment, 1, TRAIN)
            for jit, environment in (("warm", {}), ("cold", {"NUMBA_CACHE_DIR": empty}))
        ]


def _steps(
    folder: Path, environment: Mapping[str, str], steps: int, settings: Mapping[str, Any], *more: str
) -> dict[str, Any]:
    """Seconds until so many steps are done, and memory on the way."""
    with tempfile.TemporaryDirectory() as out:
        metrics = Path(out) / "run" / "metrics.jsonl"
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()] + list(more)
        flags += [f"--dataset={folder}", f"--out={metrics.parent}", "--device=cpu"]
        done, found = 0, {}
        with Child("-m", "megagraph", "train", *flags, environment=environment) as child:
            while done < steps and child.running():
                before, done = done, metrics.read_text().count("\n") if metrics.exists() else 0
                for seen in (1, EARLY_STEP, LATE_STEP):
                    if before < seen <= done:
                        found |= {f"step_{seen}_seconds": child.seconds, f"step_{seen}_cpu_seconds": child.cpu_seconds}
                        found |= {f"step_{seen}_{name}": size for name, size in child.sample().items()}
        return found | child.peak


def _full(folder: Path) -> list[dict[str, Any]]:
    said, measured = run("-m", "bench.paper.products_size", f"--folder={folder}", "--step=full", "--child")
    print(said, flush=True)
    rows = [{"step": "lists", **FULL_LISTS, **measured, **json.loads(said.splitlines()[-1])}]
    for checkpoint in ((), ("--checkpoint",)):
        row = {"step": "full", "checkpoint": bool(checkpoint), **FULL, **FULL_STEP}
        rows.append(row | _steps(folder, {}, 1, FULL, "--epochs=1", *checkpoint))
        print(json.dumps(rows[-1]), flush=True)
    return [*rows, *(_larger(row, rows[0]["batch_bytes"]) for row in rows[1:])]


def _larger(row: dict[str, Any], batch_bytes: int) -> dict[str, Any]:
    """What LARGER layers would take on a GPU, if they hold as many numbers a node and width as those of this process
    at its peak, what comes and goes among them."""
    given = batch_bytes + 4 * NODES * FEATURES
    number = 4 * NODES * FULL["layers"] * FULL["dim"]
    held = (row["peak_uss_bytes"] - given) / number
    of_gpu = given + held * number * LARGER["layers"] * LARGER["dim"] // (FULL["layers"] * FULL["dim"])
    extrapolated = {"numbers_per_node_layer_and_width": held, "extrapolated_bytes": of_gpu}
    return {"step": "extrapolated", "checkpoint": row["checkpoint"], **LARGER, **extrapolated}


def _lists(folder: Path) -> dict[str, object]:
    """Everything that is made once for full batches, and what the lists and buckets of a step take."""
    from megagraph.attention.layout import NodeLayout
    from megagraph.data.options import BatchOptions
    from megagraph.data.prepare import prepare
    from megagraph.data.store import open_store

    for path in (folder / "cache").glob("*.npy"):
        path.unlink()
    options = BatchOptions(bias="bucket", **{name: FULL[name] for name in ("batching", "hops", "top", "super_nodes")})
    layout, seconds = NodeLayout(NODES, options.num_super), []
    for _ in range(2):
        started = time.perf_counter()
        structure = prepare(open_store(folder), options).structure
        seconds.append(time.perf_counter() - started)
    return {
        "prepare_seconds": seconds[0],
        "prepare_again_seconds": seconds[1],  # of what is kept in the store
        "pairs": structure.num_pairs,
        "batch_bytes": structure.num_bytes(1, layout),
    }


def _coarsen(folder: Path, step: Method) -> dict[str, object]:
    from megagraph.data.coarsen import merge, partition, quality, quotient
    from megagraph.data.datasets import synthetic_graph
    from megagraph.data.store import open_store

    started = time.perf_counter()
    partition(synthetic_graph(num_nodes=100), 10, step)
    jit_seconds = time.perf_counter() - started
    graph = open_store(folder)
    for kind in (step, "super"):
        for path in (folder / "cache").glob(f"partition-{kind}-*"):
            path.unlink()
    started = time.perf_counter()
    clusters = partition(graph, CLUSTERS, step)
    partitioned = time.perf_counter()
    print(f"{step}: {partitioned - started:.1f} s, {quality(graph, clusters)}", file=sys.stderr, flush=True)
    supers, _ = merge(graph, clusters, quotient(graph, clusters), SUPER_NODES)
    merged = time.perf_counter()
    again = partition(graph, CLUSTERS, step)
    cached_seconds = time.perf_counter() - merged
    assert (again == clusters).all()
    chance = np.random.default_rng(SEED).permutation(graph.num_nodes) % CLUSTERS
    return {
        "jit_seconds": jit_seconds,  # compiling, or reading what has been compiled before
        "partition_seconds": partitioned - started,
        "merge_seconds": merged - partitioned,
        "cached_seconds": cached_seconds,
        "clusters": asdict(quality(graph, clusters)),
        "super_nodes": asdict(quality(graph, supers)),
        "random_clusters": asdict(quality(graph, chance)),
    }


if __name__ == "__main__":
    tyro.cli(main)
