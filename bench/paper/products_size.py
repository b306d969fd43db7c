"""A graph of the size of ogbn-products: generated, then coarsened by METIS and by label propagation.

    python -m bench.paper.products_size --folder FOLDER --step generate
    python -m bench.paper.products_size --folder FOLDER --step propagation
    python -m bench.paper.products_size --folder FOLDER --step metis

Settings are fixed. Peak memory is that of the process tree, sampled: USS (private pages, mapped files that nobody else
maps among them), and RSS beside it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from bench.provenance import write_rows

NODES, EDGES, FEATURES, CLASSES, SEED = 2_449_029, 61_859_140, 100, 47, 0
CLUSTERS, SUPER_NODES = 8192, 255
_SAMPLE_SECONDS = 0.25

Step = Literal["generate", "propagation", "metis"]


def main(folder: Path, step: Step, child: bool = False) -> None:
    """Run one step in a process of its own and write its row; ``child`` is that process."""
    if child:
        print(json.dumps(_coarsen(folder, step)))
        return
    if step == "generate":
        sizes = {"nodes": NODES, "edges": EDGES, "features": FEATURES, "classes": CLASSES, "seed": SEED}
        flags = [f"--{name}={value}" for name, value in sizes.items()]
        command = ["-m", "megagraph", "data", "generate", f"--out={folder}", *flags]
    else:
        sizes = {"clusters_wanted": CLUSTERS, "super_nodes_wanted": SUPER_NODES}
        command = ["-m", "bench.paper.products_size", f"--folder={folder}", f"--step={step}", "--child"]
    said, measured = _run([sys.executable, *command])
    print(said)
    row = {"step": step, **sizes, **measured}
    if step == "generate":
        row |= json.loads((folder / "header.json").read_text())["notes"]
    else:
        row |= json.loads(said.splitlines()[-1])
    print(json.dumps(row, indent=1))
    print(write_rows(f"products_size/{step}", [row]))


def _coarsen(folder: Path, step: Step) -> dict[str, object]:
    from megagraph.data.coarsen import merge, partition, quality, quotient
    from megagraph.data.datasets import synthetic_graph
    from megagraph.data.store import open_store

    started = time.perf_counter()
    partition(synthetic_graph(num_nodes=100), 10, step)
    jit_seconds = time.perf_counter() - started
    graph = open_store(folder)
    for path in (folder / "cache").glob(f"partition-{step}-*"):
        path.unlink()
    started = time.perf_counter()
    clusters = partition(graph, CLUSTERS, step)
    partitioned = time.perf_counter()
    print(f"{step}: {partitioned - started:.1f} s, {quality(graph, clusters)}", file=sys.stderr, flush=True)
    supers = merge(clusters, quotient(graph, clusters), SUPER_NODES)
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


def _run(command: list[str]) -> tuple[str, dict[str, float]]:
    """What a command prints, and its seconds and peak bytes."""
    peak = {"peak_uss_bytes": 0, "peak_rss_bytes": 0}
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        total = [_memory(pid) for pid in _tree(process.pid)]
        for name, values in zip(peak, zip(*total, strict=True), strict=False):
            peak[name] = max(peak[name], sum(values))
        time.sleep(_SAMPLE_SECONDS)
    seconds = time.perf_counter() - started
    said = process.stdout.read() if process.stdout else ""
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said.strip(), {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, **peak}


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(process for child in children for process in _tree(int(child)))]


def _memory(pid: int) -> tuple[int, int]:
    """USS and RSS in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return sum(size for name, size in sizes.items() if name.startswith("Private_")), sizes["Rss"]


if __name__ == "__main__":
    tyro.cli(main)
