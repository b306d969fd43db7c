"""Data sets by name: where each comes from, and a synthetic one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from megagraph import files
from megagraph.data.graph import Graph, Split
from megagraph.data.npz import load_npz
from megagraph.data.store import open_store
from megagraph.flags import closest

_CLASS_SIGNAL = 1.2  # synthetic class means: distance from the origin, in standard deviations of one feature


def _pyg(kind: str, root: Path, name: str, seed: int) -> Graph:
    """A data set of torch_geometric; a class without ``name`` is one data set, and takes its folder."""
    from torch_geometric import datasets

    with _alone(root):
        data = getattr(datasets, kind)(*([str(root / name)] if kind == name else [str(root), name]))[0]
    return Graph.from_data(data, name.lower(), seed)


def _ogb(root: Path, name: str, seed: int) -> Graph:
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        raise ImportError(f"{name} is read by the ogb package: pip install 'megagraph[ogb]'") from error
    from unittest.mock import patch

    # ogb reads its own pickled arrays with torch.load, which has refused them by default since torch 2.6
    with _alone(root), patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"):
        dataset = NodePropPredDataset(name, str(root))
        graph, labels = dataset[0]
        parts = dataset.get_idx_split()
    split = Split(*(np.sort(parts[part]) for part in ("train", "valid", "test")))
    return Graph.from_arrays(name, graph["node_feat"], graph["edge_index"], labels, split)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Let other processes that read data sets of this folder wait: those libraries write what they make of raw files
    in place, and a second one would read half of it."""
    lock = FileLock(root / ".lock")
    with suppress(OSError, NotImplementedError):  # the folder may only be read, or its file system has no locks
        root.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@dataclass(frozen=True, slots=True)
class _Source:
    """How a named data set is read (a class of torch_geometric, or ogb), its name there, and its raw files."""

    kind: str
    name: str
    raw: str

    def load(self, root: Path, seed: int) -> Graph:
        return _ogb(root, self.name, seed) if self.kind == "ogb" else _pyg(self.kind, root, self.name, seed)


_PLANETOID_RAW = "{0}/raw/ind.{1}.x, .tx, .allx, .y, .ty, .ally, .graph and .test.index"
_HETEROPHILOUS = ("Roman-empire", "Amazon-ratings", "Minesweeper", "Tolokers", "Questions")
_GEOM_RAW = "{0}/raw/out1_node_feature_label.txt, out1_graph_edges.txt and {1}_split_0.6_0.2_0.npz to _9.npz"
_OGB_RAW = "{0}/raw and {0}/split as unpacked from the OGB archive"
_SOURCES = {
    "citeseer": _Source("Planetoid", "CiteSeer", _PLANETOID_RAW.format("CiteSeer", "citeseer")),
    "cora": _Source("Planetoid", "Cora", _PLANETOID_RAW.format("Cora", "cora")),
    "pubmed": _Source("Planetoid", "PubMed", _PLANETOID_RAW.format("PubMed", "pubmed")),
    "dblp": _Source("CitationFull", "DBLP", "dblp/raw/dblp.npz"),
    "computers": _Source("Amazon", "Computers", "Computers/raw/amazon_electronics_computers.npz"),
    "photo": _Source("Amazon", "Photo", "Photo/raw/amazon_electronics_photo.npz"),
    "cs": _Source("Coauthor", "CS", "CS/raw/ms_academic_cs.npz"),
    "physics": _Source("Coauthor", "Physics", "Physics/raw/ms_academic_phy.npz"),
    "actor": _Source("Actor", "Actor", _GEOM_RAW.format("Actor", "film")),
    "chameleon": _Source("WikipediaNetwork", "chameleon", _GEOM_RAW.format("chameleon/geom_gcn", "chameleon")),
    "squirrel": _Source("WikipediaNetwork", "squirrel", _GEOM_RAW.format("squirrel/geom_gcn", "squirrel")),
    **{
        name.lower(): _Source(
            "HeterophilousGraphDataset", name, "{0}/raw/{0}.npz".format(name.lower().replace("-", "_"))
        )
        for name in _HETEROPHILOUS
    },
    "reddit": _Source("Reddit", "Reddit", "Reddit/raw/reddit_data.npz and reddit_graph.npz"),
    "reddit2": _Source("Reddit2", "Reddit2", "Reddit2/raw/adj_full.npz, feats.npy, class_map.json and role.json"),
    "yelp": _Source("Yelp", "Yelp", "Yelp/raw/adj_full.npz, feats.npy, class_map.json and role.json"),
    "ogbn-arxiv": _Source("ogb", "ogbn-arxiv", _OGB_RAW.format("ogbn_arxiv")),
    "ogbn-products": _Source("ogb", "ogbn-products", _OGB_RAW.format("ogbn_products")),
}


def load_graph(dataset: str, root: Path | None, seed: int = 0) -> Graph:
    """Load a data set by name, from an ``.npz`` file (``load_npz``), or from a store.

    Args:
        dataset: "synthetic", a name of the list above, a path that ends in ``.npz``, or the folder of a store.
        root: folder of the named data sets. Raw files found there are used, others are downloaded by PyG or
            ogb, which also write a ``processed`` folder beside ``raw``; processes do so one after the other.
        seed: of the synthetic graph; of a data set with several splits of its own (ten, mostly), which one.

    Raises:
        FileNotFoundError, ValueError: no such data, or some that is damaged; names the file.
        OSError, ImportError: it cannot be read, or not without another package.
    """
    if dataset in ("synthetic", *_SOURCES) and (Path(dataset) / "header.json").is_file():
        raise ValueError(
            f"expected a data set or a store, got {dataset}, which is both: ./{dataset} is the folder; for the data "
            "set call the folder otherwise"
        )
    if dataset == "synthetic":
        return synthetic_graph(seed=seed)
    if dataset.endswith(".npz"):
        return load_npz(Path(dataset))
    source = _SOURCES.get(dataset)
    if source is None and Path(dataset).is_dir():
        return open_store(Path(dataset))
    source = source or _SOURCES.get(dataset.lower())  # PyG writes CiteSeer
    if source is None:
        names = ["synthetic", *_SOURCES]
        close = closest(dataset, names)
        meant = files.meant(Path(dataset)) or (f"; did you mean {close!r}?" if close else "")
        raise ValueError(
            f"expected one of {', '.join(names)}, a path to an .npz file, or a store folder, got {dataset!r}{meant}"
        )
    if root is None:
        raise ValueError(f"expected a folder for {dataset}, got none; name it with --root")
    try:
        return source.load(Path(root), seed)
    except (ImportError, ValueError):
        raise
    except Exception as error:  # whatever the downloading library raises
        raise OSError(
            f"could not read or download {dataset}: {error}; expected the raw files {Path(root) / source.raw}"
        ) from error


def synthetic_graph(
    num_nodes: int = 2000,
    num_classes: int = 6,
    in_features: int = 64,
    average_degree: float = 8.0,
    homophily: float = 0.8,
    seed: int = 0,
) -> Graph:
    """Degree-corrected stochastic block model (Karrer & Newman 2011) with noisy class-dependent features.

    An edge starts at a node drawn by its propensity (Pareto, exponent 2.5), stays in that node's class with
    probability ``homophily`` and ends, in the class chosen, at a node drawn by propensity again. Features are
    Gaussian around a class mean, so noisy that they need the neighbourhood's to tell classes well.
    """
    if num_classes < 2 or num_nodes < num_classes:
        raise ValueError(f"expected 2 <= num_classes <= num_nodes, got {num_classes} and {num_nodes}")
    rng = np.random.default_rng(seed)
    labels = np.arange(num_nodes) * num_classes // num_nodes
    propensity = np.minimum((1 - rng.random(num_nodes)) ** (-1 / 1.5), np.sqrt(num_nodes))
    mass = np.concatenate([[0.0], np.cumsum(propensity)])
    class_mass = mass[np.searchsorted(labels, np.arange(num_classes + 1))]

    def draw(low: np.ndarray | float, high: np.ndarray | float) -> np.ndarray:
        """Nodes by propensity, from the stretch of mass between low and high."""
        point = low + rng.random(num_edges) * (high - low)
        return np.minimum(np.searchsorted(mass, point, side="right") - 1, num_nodes - 1)

    num_edges = round(num_nodes * average_degree / 2)
    row = draw(0.0, mass[-1])
    other = (labels[row] + rng.integers(1, num_classes, num_edges)) % num_classes
    column_class = np.where(rng.random(num_edges) < homophily, labels[row], other)
    col = draw(class_mass[column_class], class_mass[column_class + 1])

    means = rng.standard_normal((num_classes, in_features)) * (_CLASS_SIGNAL / np.sqrt(in_features))
    features = means[labels] + rng.standard_normal((num_nodes, in_features))
    new_id = rng.permutation(num_nodes)  # node ids must not give the class away
    old_id = np.argsort(new_id)
    return Graph.from_arrays("synthetic", features[old_id], new_id[np.stack([row, col])], labels[old_id])
