"""How long data construction takes: sampling, structure, preparation, and beside training.

    python -m bench.data --step ego --products FOLDER
    python -m bench.data --step cluster --products FOLDER
    python -m bench.data --step powers --root ROOT
    python -m bench.data --step packing --root ROOT
    python -m bench.data --step prepare --root ROOT
    python -m bench.data --step throughput --root ROOT
    python -m bench.data --step tables

FOLDER is the graph that ``bench.paper.products_size --step generate`` leaves; ROOT holds Cora, CiteSeer, PubMed,
Computers, and wordnet30/raw/wordnet30.npz and debian12/raw/debian12.npz. Every measurement has a process of its own,
whose peak memory is in the row (see bench.processes). All but ``prepare`` are pinned to cores: ``ego``, ``cluster`` and
``powers`` to one, ``throughput`` to one for training and another for the loader's worker.

ego: end to end, from target nodes to a batch without features: N' = 15, N_s = 1, six channels, super nodes of 300
nodes. With a curve over epsilon: the share of the exact top 14's PageRank mass (epsilon 1e-7) that is in the top 14
found, and the slots filled.
cluster: end to end, with features: the rows of one of four ranks, N' = 8192, N_s = 256, distances up to 8. With the
share of the edges that is within a sequence, by the packing that training uses and by packing clusters at random.
powers: batches with six powers of the whole graph's adjacency, other settings as they are by default: of 256 target
nodes, 64 a batch, and of two cluster sequences.
packing: the same two shares on real graphs, N' = 1024, over five seeds.
prepare: what ``megagraph train`` computes once for a graph; Numba's cache is empty (cold), then as that left it.
throughput: steps of ``megagraph train`` on debian12, from a loader with one worker and from batches in memory.
tables: ``megagraph data import`` of nodes.csv, 10^6 word ids with two numbers, a word and a class, and of edges.csv,
10^7 pairs of such ids, seed 0, on all cores.

Numba's cache is empty at first everywhere: ``prepare_seconds`` and ``first_batch_seconds`` are with compilation.
Seconds are by the clock, and of CPU time beside: on a busy machine these bound what the clock shows on an idle one.
Settings and limits are fixed.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro

from bench.processes import run
from bench.provenance import PACKAGE, write_rows
from megagraph.attention.dropout import dropout_keys
from megagraph.config import TrainConfig
from megagraph.data import traversal
from megagraph.data.batch import Batch, Share
from megagraph.data.cluster import ClusterBatches
from megagraph.data.coarsen import quality
from megagraph.data.datasets import load_graph
from megagraph.data.ego import EgoBatches
from megagraph.data.graph import Graph, csr_arrays
from megagraph.data.loader import Loader
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.sample import ALPHA, known_nodes
from megagraph.data.store import open_store
from megagraph.evaluate import batches, choose_split, make_loader, make_model
from megagraph.planner.plan import Plan
from megagraph.train_step import make_optimizers, make_pipeline, train_step

SEED, ROUNDS = 0, 5
EPSILON, K = 1e-4, 14
EGO = {"sample_nodes": K, "samples": 1, "super_nodes": 1, "global_tokens": 0, "super_ratio": 1 / 300}
EGO_BATCH, EGO_BATCHES, SEQUENCES_PER_SECOND = 256, 16, 4000  # at least
CURVE, EXACT, CURVE_SOURCES = (1e-3, 3e-4, 1e-4, 3e-5), 1e-7, 200
CLUSTER = {"batching": "cluster", "bias": "bucket", "sequence_nodes": 8192, "super_nodes": 256, "max_distance": 8}
CLUSTER_RANKS, CLUSTER_SEQUENCES, CLUSTER_SECONDS = 4, 5, 0.4  # at most
POWERS_OF = ("synthetic", "cora", "pubmed", "computers")
EGO_TARGETS, TARGETS_OF_BATCH, CLUSTERED = 256, 64, 2
POWERS = {f"{batching}-{name}": (batching, name) for batching in ("ego", "cluster") for name in POWERS_OF}
PACKED = ("computers", "pubmed", "wordnet30", "debian12")
PREPARE_SECONDS = {  # at most: with Numba warm, and cold
    "cora": (1, 10),
    "citeseer": (1, 10),
    "wordnet30": (30, 30),
    "debian12": (30, 30),
}
TRAINING = {
    "ego": TrainConfig(seed=SEED, device="cpu"),
    "cluster": TrainConfig(seed=SEED, device="cpu", batching="cluster", batch_size=1),
}
WARM_STEPS, STEPS, SHARE_OF_PREBUILT = 5, 30, 0.9  # at least; the first steps use up what has been built ahead

TABLES = {"nodes": 10**6, "edges": 10**7}
TABLES_SECONDS, TABLES_BYTES = 60, 3 << 30  # at most

Step = Literal["ego", "cluster", "powers", "packing", "prepare", "throughput", "tables"]


def main(step: Step, products: Path | None = None, root: Path | None = None, child: str | None = None) -> None:
    """Run one step and write its rows; ``child`` is the process of one measurement."""
    if child is not None:
        print(json.dumps(_measure(step, products, root, child)))
        return
    cases = {"powers": POWERS, "packing": PACKED, "prepare": PREPARE_SECONDS, "throughput": TRAINING}.get(step, [step])
    rows = []
    for case in cases:
        with tempfile.TemporaryDirectory() as empty:
            environment = {"NUMBA_CACHE_DIR": empty, "OMP_NUM_THREADS": "1"}
            flags = [f"--step={step}", f"--child={case}"]
            flags += [f"--{name}={value}" for name, value in (("products", products), ("root", root)) if value]
            for numba in ("cold", "warm") if step == "prepare" else ("cold",):
                said, measured = run("-m", "bench.data", *flags, environment=environment)
                rows.append({"step": step, "case": case, "numba": numba, **json.loads(said), "process": measured})
                print(json.dumps(rows[-1], indent=1))
    print(write_rows(f"data/{step}", rows, children=PACKAGE))


def _measure(step: Step, products: Path | None, root: Path | None, case: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    if step == "packing":
        return _packing(root, case)
    if step == "prepare":
        return _prepare(root, case)
    if step == "throughput":
        return _throughput(root, case)
    if step == "tables":
        return _tables()
    os.sched_setaffinity(0, {0})
    if step == "powers":
        return _powers(root, *POWERS[case])
    if products is None:
        raise SystemExit(f"--step {step} needs --products")
    return _ego(products) if step == "ego" else _cluster(products)


def _ego(products: Path) -> dict[str, Any]:
    graph = open_store(products)
    graph = replace(graph, features=graph.features[:, :0])
    rng = np.random.default_rng(SEED)
    builder, preparing = _timed(lambda: prepare(graph, BatchOptions(**EGO)))
    assert isinstance(builder, EgoBatches) and builder.pagerank.epsilon == EPSILON
    targets = rng.integers(graph.num_nodes, size=EGO_BATCH * EGO_BATCHES)
    loader = Loader(builder, targets, batch_size=EGO_BATCH, seed=SEED, shuffle=False)
    _, first = _timed(lambda: next(iter(loader.epoch(0))))
    rounds, filled = [], []
    for epoch in range(ROUNDS):
        built, seconds = _timed(lambda epoch=epoch: list(loader.epoch(epoch)))
        rounds.append({clock: len(targets) / value for clock, value in seconds.items()})
        filled += [1 - batch.key_padding_mask[:, 1 : 1 + K].float().mean().item() for batch in built]
    return {
        "unit": "sequences/s",
        **_by_clock(rounds),
        "limit": SEQUENCES_PER_SECOND,
        "sequences": len(targets),
        "batch": EGO_BATCH,
        **EGO,
        "epsilon": EPSILON,
        "alpha": ALPHA,
        "sequence_nodes": builder.sequence_nodes,
        "prepare_seconds": preparing,
        "first_batch_seconds": first,
        "filled_slots": K * float(np.mean(filled)),
        "curve": _curve(builder, rng),
    }


def _curve(builder: EgoBatches, rng: np.random.Generator) -> list[dict[str, float]]:
    """A row for every epsilon, each of the same sources."""
    graph = builder.graph
    sources = rng.choice(graph.num_nodes, CURVE_SOURCES, replace=False)

    def top(epsilon: float) -> list[dict[int, float]]:
        """Weights of the K strongest of every source."""
        csr = csr_arrays(graph.indptr, graph.indices)
        counts, nodes, weights = traversal.pagerank(sources, *csr, ALPHA, epsilon, K, known_nodes(graph))
        cuts = np.cumsum(counts)[:-1]
        pairs = zip(np.split(nodes, cuts), np.split(weights, cuts), strict=True)
        return [dict(zip(n.tolist(), w.tolist(), strict=True)) for n, w in pairs]

    exact = top(EXACT)
    rows = []
    for epsilon in CURVE:
        found, seconds = _timed(lambda epsilon=epsilon: top(epsilon))
        shares = [
            sum(w for node, w in best.items() if node in here) / sum(best.values())
            for best, here in zip(exact, found, strict=True)
        ]
        rows.append(
            {
                "epsilon": epsilon,
                "top_mass_share": float(np.mean(shares)),
                "smallest_share": float(min(shares)),
                "filled_slots": float(np.mean([len(here) for here in found])),
                "push_seconds": seconds["cpu"] / len(sources),
            }
        )
    return rows


def _cluster(products: Path) -> dict[str, Any]:
    graph = open_store(products)
    builder, preparing = _timed(lambda: prepare(graph, BatchOptions(**CLUSTER)))
    assert isinstance(builder, ClusterBatches)
    sequences = builder.plan(np.arange(graph.num_nodes), 1, np.random.default_rng(SEED))
    mask = np.ones(graph.num_nodes, bool)

    def build(index: int) -> Batch:
        share = Share(cp_rank=index % CLUSTER_RANKS, cp=CLUSTER_RANKS)
        return builder.build(sequences[index], mask, np.random.default_rng(SEED), share)

    batch, first = _timed(lambda: build(0))
    seconds = [_timed(lambda index=index: build(index))[1] for index in range(1, 1 + CLUSTER_SEQUENCES * CLUSTER_RANKS)]
    return {
        "unit": "s",
        **_by_clock(seconds),
        "limit": CLUSTER_SECONDS,
        **CLUSTER,
        "ranks": CLUSTER_RANKS,
        "rows": batch.layout.num_local,
        "structure_bytes": batch.structure.untyped_storage().nbytes(),
        "prepare_seconds": preparing,
        "first_batch_seconds": first,
        "clusters": asdict(builder.quality),
        "kept_edges": {
            "together": builder.together,
            "share": _kept_edges(graph, builder, builder.together, SEED),
            "random": _kept_edges(graph, builder, 0, SEED),
        },
    }


def _powers(root: Path | None, batching: str, name: str) -> dict[str, Any]:
    graph = load_graph(*_dataset(root, name))
    builder, preparing = _timed(lambda: prepare(graph, BatchOptions(batching=batching, power_scope="graph")))
    rng = np.random.default_rng(SEED)
    if batching == "ego":
        plan = builder.plan(rng.permutation(graph.num_nodes)[:EGO_TARGETS], TARGETS_OF_BATCH, rng)
    else:
        plan = builder.plan(np.arange(graph.num_nodes), 1, rng)[:CLUSTERED]
    mask = np.ones(graph.num_nodes, bool)

    def build() -> Batch:
        for item in plan:
            batch = builder.build(item, mask, np.random.default_rng(SEED))
        return batch

    batch, first = _timed(build)
    return {
        "unit": "s",
        **_by_clock([_timed(build)[1] for _ in range(ROUNDS)]),
        "batches": len(plan),
        "batch": list(batch.structure.shape),
        "powers": str(builder.structure.powers),
        "prepare_seconds": preparing,
        "first_batches_seconds": first,
    }


def _kept_edges(graph: Graph, builder: ClusterBatches, together: float, seed: int) -> float:
    """Share of the edges that a packing leaves within sequences."""
    packing = copy.copy(builder)
    packing.together = together
    sequence_of = np.empty(graph.num_nodes, np.int64)
    for sequence, (nodes,) in enumerate(packing.plan(np.arange(graph.num_nodes), 1, np.random.default_rng(seed))):
        sequence_of[nodes[nodes >= 0]] = sequence
    return 1 - quality(graph, sequence_of).edge_cut


def _packing(root: Path | None, case: str) -> dict[str, Any]:
    graph = load_graph(*_dataset(root, case))
    builder = prepare(graph, BatchOptions(batching="cluster", bias="bucket"))
    assert isinstance(builder, ClusterBatches)
    kept, random = (
        [_kept_edges(graph, builder, together, seed) for seed in range(ROUNDS)] for together in (builder.together, 0)
    )
    return {
        "unit": "share of the edges",
        **_spread(kept),
        "random": _spread(random),
        "together": builder.together,
        "within_clusters": 1 - builder.quality.edge_cut,
    }


def _prepare(root: Path | None, case: str) -> dict[str, Any]:
    graph = load_graph(*_dataset(root, case))
    builder, seconds = _timed(lambda: batches(TrainConfig(), graph))
    return {
        "unit": "s",
        "seconds": seconds,
        "limits": dict(zip(("warm", "cold"), PREPARE_SECONDS[case], strict=True)),
        "nodes": graph.num_nodes,
        "largest_degree": int(np.diff(graph.indptr).max()),
        "scope": builder.structure.powers.scope,
    }


def _dataset(root: Path | None, name: str) -> tuple[str, Path]:
    if root is None:
        raise SystemExit("expected --root, the folder of the data sets")
    raw = root / name / "raw" / f"{name}.npz"
    return (str(raw) if raw.is_file() else name), root


def _throughput(root: Path | None, case: str) -> dict[str, Any]:
    config = replace(TRAINING[case], workers=1)
    graph = load_graph(*_dataset(root, "debian12"))
    builder = batches(config, graph)
    train = choose_split(graph, config).train
    prebuilt = list(
        itertools.islice(
            make_loader(replace(config, workers=0), builder, train, shuffle=True).epoch(0), WARM_STEPS + STEPS
        )
    )
    torch.manual_seed(SEED)
    model = make_model(
        config,
        config.model_config(
            in_features=graph.in_features, num_classes=graph.num_classes, bias_size=builder.structure.size
        ),
    )
    pipeline = make_pipeline(model, Plan(), None, torch.device("cpu"), config)
    optimizers = make_optimizers(pipeline, config)
    loader = make_loader(config, builder, train, shuffle=True)

    def steps_of(given: Iterable[Batch]) -> tuple[float, list[float]]:
        """Steps a second after the first few, and the wait for each batch."""
        stalls = []
        batches_left, waiting = pipeline.receive(given), time.perf_counter()
        for step in range(WARM_STEPS + STEPS):
            batch = next(batches_left)
            stalls.append(time.perf_counter() - waiting)
            if step == WARM_STEPS:
                started = waiting
            keys = dropout_keys(SEED, step, batch.sequence_ids)
            train_step(pipeline, optimizers, batch, keys, config.clip_norm)
            waiting = time.perf_counter()
        return STEPS / (waiting - started), stalls[WARM_STEPS:]

    os.sched_setaffinity(0, {1})
    iter(loader.epoch(0))  # its worker stays on the second core
    os.sched_setaffinity(0, {0})
    rounds, stalls = {"loader": [], "prebuilt": []}, []
    for epoch in range(ROUNDS):
        rounds["prebuilt"].append(steps_of(prebuilt)[0])
        speed, waits = steps_of(loader.epoch(epoch))
        rounds["loader"].append(speed)
        stalls += waits
    ratios = [ours / most for ours, most in zip(rounds["loader"], rounds["prebuilt"], strict=True)]
    return {
        "unit": "share of the steps/s of prebuilt batches",
        **_spread(ratios),
        "limit": SHARE_OF_PREBUILT,
        "steps": STEPS,
        "loader": {"unit": "steps/s", **_spread(rounds["loader"])},
        "prebuilt": {"unit": "steps/s", **_spread(rounds["prebuilt"])},
        "stall_seconds": {"median": float(np.median(stalls)), "mean": float(np.mean(stalls)), "max": max(stalls)},
        "sequence_nodes": builder.sequence_nodes,
    }


def _tables() -> dict[str, Any]:
    import polars

    rng, (nodes, edges) = np.random.default_rng(SEED), TABLES.values()
    ids = np.array([f"user_{i:x}_{i * 2654435761 % 2**32:08x}" for i in range(nodes)])
    columns = {"age": rng.integers(18, 90, nodes), "score": rng.normal(size=nodes)}
    columns |= {"kind": rng.choice(["a", "b", "c"], nodes), "label": rng.choice(["x", "y", "z"], nodes)}
    ends = {name: ids[rng.integers(0, nodes, edges)] for name in ("source", "target")}
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/nodes.csv", f"{folder}/edges.csv"]
        for path, table in zip(files, ({"id": ids} | columns, ends), strict=True):
            polars.DataFrame(table).write_csv(path)
        flags = ["--nodes", files[0], "--edges", files[1], "--out", f"{folder}/graph"]
        _, measured = run("-m", "megagraph", "data", "import", *flags)
    return {"unit": "s", **TABLES, **measured, "limits": {"seconds": TABLES_SECONDS, "rss_bytes": TABLES_BYTES}}


def _timed(function: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result, and seconds by the clock and of this process's CPU time, which a busy machine lengthens less."""
    started, cpu_started = time.perf_counter(), time.process_time()
    result = function()
    return result, {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu_started}


def _by_clock(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {clock: _spread([values[clock] for values in rounds]) for clock in ("wall", "cpu")}


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "min": min(values), "max": max(values), "rounds": len(values)}


if __name__ == "__main__":
    tyro.cli(main)
