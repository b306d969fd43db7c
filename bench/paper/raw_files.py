"""Generated graphs of the shape of real ones, in raw files of the same format: a folder for ``--root`` without data."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from megagraph.data.datasets import synthetic_graph


def write(root: Path) -> None:
    """Cora and Citeseer as Planetoid has them, and wordnet30 as ``load_npz`` reads it; what is there stays."""
    if not (root / "Cora").exists():
        _planetoid(root / "Cora" / "raw", "cora", nodes=2708, degree=3.9, features=1433, classes=7)
    if not (root / "CiteSeer").exists():
        _planetoid(root / "CiteSeer" / "raw", "citeseer", nodes=3327, degree=2.7, features=3703, classes=6)
    if not (root / "wordnet30").exists():
        _npz(root / "wordnet30" / "raw" / "wordnet30.npz", nodes=117_659, degree=3.1, features=512, classes=45)


def _planetoid(folder: Path, name: str, *, nodes: int, degree: float, features: int, classes: int) -> None:
    """The last 1,000 nodes are those of the test, the first 20 a class those of training."""
    graph = synthetic_graph(nodes, classes, features, degree, seed=0)
    x, y, test, train = graph.features, np.eye(classes, dtype=np.int32)[graph.labels], nodes - 1000, 20 * classes
    neighbours = np.split(graph.indices, graph.indptr[1:-1])
    folder.mkdir(parents=True)
    parts = {"x": x[:train], "y": y[:train], "allx": x[:test], "ally": y[:test], "tx": x[test:], "ty": y[test:]}
    for part, values in (parts | {"graph": {i: own.tolist() for i, own in enumerate(neighbours)}}).items():
        (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(values))
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, range(test, nodes))) + "\n")


def _npz(path: Path, *, nodes: int, degree: float, features: int, classes: int) -> None:
    graph = synthetic_graph(nodes, classes, features, degree, seed=0)
    values = {"labels": graph.labels}
    for key, matrix in (("adj", graph.adjacency), ("attr", sp.csr_array(np.maximum(graph.features - 2, 0)))):
        for part in ("data", "indices", "indptr", "shape"):
            values[f"{key}_{part}"] = np.asarray(getattr(matrix, part))
    path.parent.mkdir(parents=True)
    np.savez(path, **values)
