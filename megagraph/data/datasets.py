"""Graphs for node classification: one validated form, the data sets by name, and a synthetic one."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import scipy.sparse as sp
import torch
import xxhash

MAX_CLASSES = 1 << 24
_PARTS = ("train", "val", "test")
_CLASS_SIGNAL = 1.2  # synthetic class means: distance from the origin, in standard deviations of one feature
_CHUNK_ENTRIES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Sorted node ids (int64) to train on, to select by, and to report on."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def random_split(labels: np.ndarray, seed: int, train: float = 0.6, val: float = 0.2) -> Split:
    """Split the labelled nodes at random; what ``train`` and ``val`` leave over is the test part."""
    if train <= 0 or val < 0 or train + val > 1:
        raise ValueError(f"expected fractions with 0 < train, 0 <= val, train + val <= 1, got {train} and {val}")
    nodes = np.random.default_rng(seed).permutation(np.flatnonzero(labels >= 0))
    cuts = np.rint(np.cumsum([train, val]) * len(nodes)).astype(np.int64)
    return Split(*(np.sort(part) for part in np.split(nodes, cuts)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """An undirected graph with node features and labels, checked once, here.

    Shapes (V nodes, E directed edges, both directions of every edge stored):
        indptr:   [V + 1]    int64    CSR row starts
        indices:  [E]        int32    neighbours, ascending in every row, no self loops, no duplicates
        features: [V, d_in]  float32 or float16, or a float32 CSR matrix; finite
        labels:   [V]        int64    class, -1 = not labelled
    ``split`` is the data set's own split, None where it has none. ``store`` is the folder that the arrays are mapped
    from (``megagraph.data.store``), which has checked them: they stay on disk until they are read, and a process that
    is sent the graph maps them again. ``identity`` is what a store gives ``fingerprint``.
    """

    name: str
    indptr: np.ndarray
    indices: np.ndarray
    features: np.ndarray | sp.csr_array
    labels: np.ndarray
    num_classes: int
    split: Split | None = None
    store: Path | None = None
    identity: str | None = None

    def __post_init__(self) -> None:
        if self.num_nodes == 0:
            raise ValueError("expected a graph with nodes, got an empty graph; check the file it was read from")
        if self.num_edges == 0 and self.num_nodes > 1:
            raise ValueError("expected a graph with edges, got none; self loops and duplicates do not count")
        if self.features.ndim != 2 or self.features.shape[0] != self.num_nodes:
            raise ValueError(
                f"expected features of shape [{self.num_nodes}, d_in], got {list(self.features.shape)}; "
                "pass one row per node"
            )
        if self.labels.shape != (self.num_nodes,):
            raise ValueError(f"expected labels of shape [{self.num_nodes}], got {list(self.labels.shape)}")
        if self.store is None:
            self._check_values()

    def _check_values(self) -> None:
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < -1 or high >= self.num_classes:
            raise ValueError(
                f"expected labels in 0..{self.num_classes - 1}, or -1 for unlabelled, got {low}..{high}; relabel them"
            )
        if self.num_classes > MAX_CLASSES:
            raise ValueError(
                f"expected at most {MAX_CLASSES:,} classes, got {self.num_classes:,}; number them without gaps"
            )
        if high < 0:
            raise ValueError("expected labelled nodes, got -1 everywhere; add labels to train on")
        if self.split is not None:
            for part in _PARTS:
                nodes = getattr(self.split, part)
                if len(nodes) and not 0 <= nodes.min() <= nodes.max() < self.num_nodes:
                    raise ValueError(
                        f"expected the {part} part of the split in 0..{self.num_nodes - 1}, got "
                        f"{nodes.min()}..{nodes.max()}; a mask has one entry per node"
                    )

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Directed edges: twice the number of undirected ones."""
        return len(self.indices)

    @property
    def in_features(self) -> int:
        return self.features.shape[1]

    def read_features(self, nodes: np.ndarray, out: np.ndarray) -> None:
        """Rows of ``nodes`` [n] as float32 into ``out`` [n, d_in] or [n, 0]; only they are read of mapped features."""
        if out.shape[1] == 0:
            return
        if isinstance(self.features, sp.csr_array):
            self.features[nodes].toarray(out=out)
        elif self.features.dtype == out.dtype:
            np.take(self.features, nodes, axis=0, out=out, mode="clip")  # "raise" would go through a buffer
        else:
            out[...] = self.features[nodes]

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.store is None:
            return object.__reduce_ex__(self, protocol)
        from megagraph.data.store import open_store

        return open_store, (self.store, self.identity)

    @property
    def adjacency(self) -> sp.csr_array:
        """A as [V, V] float32 ones."""
        ones = np.ones(self.num_edges, np.float32)
        return sp.csr_array((ones, self.indices, self.indptr), shape=(self.num_nodes, self.num_nodes))

    def checksum(self) -> int:
        """CRC-32 of the edges."""
        return zlib.crc32(np.ascontiguousarray(self.indices).data, zlib.crc32(np.ascontiguousarray(self.indptr).data))

    def fingerprint(self) -> str:
        """32 hexadecimal digits that stand for edges, features, labels, split and the number of classes.

        The same source always has the same. That of a store comes from the checksums in its header and reads nothing;
        so the same numbers have another one where they are in memory, in another store form or of another dtype.
        """
        if self.identity is not None:
            return self.identity
        x, split = self.features, [] if self.split is None else [getattr(self.split, part) for part in _PARTS]
        features = [x.indptr, x.indices, x.data] if isinstance(x, sp.csr_array) else [x]
        digest = xxhash.xxh3_128(repr((self.num_classes, x.shape)).encode())
        for array in (self.indptr, self.indices, self.labels, *features, *split):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @classmethod
    def from_data(cls, data: Any, name: str = "graph") -> Graph:
        """Take a ``torch_geometric.data.Data``, or anything with its attributes, or an item of an OGB data set.

        Args:
            data: ``x`` [V, d_in], dense or sparse, ``edge_index`` [2, E] and ``y`` [V] or [V, 1] integer tensors;
                optionally ``train_mask``, ``val_mask`` and ``test_mask`` [V] (of several splits as columns, the
                first). Or (graph, labels) as of ``ogb.nodeproppred.NodePropPredDataset``.
                Directed edges are made undirected, self loops are dropped and duplicates merged; weighted edges are
                refused, and so are several labels a node.
        """
        if isinstance(data, tuple):
            graph, labels = data
            return cls._from_arrays(name, graph["node_feat"], graph["edge_index"], labels, None)
        x, edge_index, y = (_attribute(data, key) for key in ("x", "edge_index", "y"))
        for key in ("edge_weight", "edge_attr"):
            if getattr(data, key, None) is not None:
                _refuse_weights(f"data.{key}", _attribute(data, key))
        masks = [_attribute(data, f"{part}_mask") for part in _PARTS if hasattr(data, f"{part}_mask")]
        split = None
        if len(masks) == len(_PARTS):
            split = Split(*(np.flatnonzero(mask if mask.ndim == 1 else mask[:, 0]) for mask in masks))
        return cls._from_arrays(name, x, edge_index, y, split)

    @classmethod
    def _from_arrays(
        cls, name: str, x: np.ndarray, edge_index: np.ndarray, y: np.ndarray, split: Split | None
    ) -> Graph:
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim != 1:
            raise ValueError(
                f"expected one class per node, got multi-label y of shape {list(y.shape)}; take one column"
            )
        if not np.issubdtype(y.dtype, np.integer):
            raise ValueError(
                f"expected integer labels, got {y.dtype}; number the classes 0, 1, ... and use -1 for none"
            )
        if x.ndim != 2:
            raise ValueError(f"expected x of shape [V, d_in], got {list(x.shape)}; pass one row per node")
        if edge_index.ndim != 2 or len(edge_index) != 2 or not np.issubdtype(edge_index.dtype, np.integer):
            raise ValueError(
                f"expected an integer edge_index of shape [2, E], got {edge_index.dtype} {list(edge_index.shape)}"
            )
        num_nodes, y = x.shape[0], y.astype(np.int64)
        if sp.issparse(x):
            x = sp.csr_array(x, dtype=np.float32)
        elif x.dtype != np.float16:
            with np.errstate(over="ignore"):  # what is too large is infinite then, and refused
                x = np.ascontiguousarray(x, np.float32)
        check_finite(x)
        if edge_index.size and (edge_index.min() < 0 or edge_index.max() >= num_nodes):
            raise ValueError(
                f"expected edge_index in 0..{num_nodes - 1}, got {edge_index.min()}..{edge_index.max()}; "
                "x has one row per node"
            )
        row, col = edge_index[:, edge_index[0] != edge_index[1]]
        pairs = (np.concatenate([row, col]), np.concatenate([col, row]))
        adjacency = sp.coo_array((np.ones(len(pairs[0]), bool), pairs), shape=(num_nodes, num_nodes)).tocsr()
        adjacency.sum_duplicates()  # sorts every row too
        return cls(
            name=name,
            indptr=adjacency.indptr.astype(np.int64),
            indices=adjacency.indices.astype(np.int32),
            features=x,
            labels=y,
            num_classes=int(y.max(initial=-1)) + 1,
            split=split,
        )


def csr_arrays(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As the compiled loops take them: int64 and int32 (no copy where they are), of a mapped file its plain view."""
    return np.asarray(indptr, np.int64), np.asarray(indices, np.int32)


def _attribute(data: Any, key: str) -> Any:
    """A tensor as a numpy array; a sparse ``x`` as a CSR matrix."""
    value = getattr(data, key, None)
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"expected data.{key} to be a tensor, got {type(value).__name__}; a graph needs x, edge_index and y"
        )
    if value.layout == torch.strided:
        return value.numpy(force=True)
    if key != "x" or value.ndim != 2:
        return value.to_dense().numpy(force=True)
    value = value.to_sparse_coo().coalesce()
    entries = (value.values().numpy(force=True), tuple(value.indices().numpy(force=True)))
    return sp.coo_array(entries, shape=tuple(value.shape)).tocsr()


def check_finite(features: np.ndarray | sp.csr_array) -> None:
    """Raise ValueError that names the first feature that is NaN or inf."""
    entries = features.data if isinstance(features, sp.csr_array) else np.ascontiguousarray(features).reshape(-1)
    if (at := first_infinite(entries)) is None:
        return
    if isinstance(features, sp.csr_array):
        node, feature = int(np.searchsorted(features.indptr, at, side="right")) - 1, int(features.indices[at])
    else:
        node, feature = divmod(at, features.shape[1])
    raise ValueError(f"expected finite features, got {entries[at]} in feature {feature} of node {node}; clean that row")


def first_infinite(entries: np.ndarray) -> int | None:
    """Where the first NaN or inf stands in a float16 or float32 array [n]."""
    bits, exponent = ("u2", 0x7C00) if entries.dtype == np.float16 else ("u4", 0x7F800000)
    for first in range(0, len(entries), _CHUNK_ENTRIES):  # chunks that stay in the cache of a core
        found = entries[first : first + _CHUNK_ENTRIES].view(bits) & np.array(exponent, bits)
        if found.max() == exponent:
            return first + int(found.argmax())
    return None


def _refuse_weights(name: str, weights: np.ndarray) -> None:
    if weights.size and (weights != weights.flat[0]).any():
        raise ValueError(
            f"expected an unweighted graph, got {name} with values of {weights.min():g}..{weights.max():g}; "
            "weighted edges and edge features are not supported: take them away, or drop the weakest edges"
        )


def _planetoid(root: Path, name: str) -> Graph:
    from torch_geometric.datasets import Planetoid

    return Graph.from_data(Planetoid(str(root), name)[0], name.lower())


def _amazon(root: Path, name: str) -> Graph:
    from torch_geometric.datasets import Amazon

    return Graph.from_data(Amazon(str(root), name)[0], name.lower())


def _reddit(root: Path, name: str) -> Graph:
    from torch_geometric import datasets

    return Graph.from_data(getattr(datasets, name)(str(root / name))[0], name.lower())


def _ogb(root: Path, name: str) -> Graph:
    try:
        from ogb.nodeproppred import NodePropPredDataset
    except ImportError as error:
        raise ImportError(f"{name} is read by the ogb package: pip install 'megagraph[ogb]'") from error
    from unittest.mock import patch

    # ogb reads its own pickled arrays with torch.load, which has refused them by default since torch 2.6
    with patch.dict(os.environ, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1"):
        dataset = NodePropPredDataset(name, str(root))
        graph, labels = dataset[0]
        parts = dataset.get_idx_split()
    split = Split(*(np.sort(parts[part]) for part in ("train", "valid", "test")))
    return Graph._from_arrays(name, graph["node_feat"], graph["edge_index"], labels, split)


@dataclass(frozen=True, slots=True)
class _Source:
    """How a named data set is read, its name there, and the raw files it is read from."""

    load: Callable[[Path, str], Graph]
    name: str
    raw: str


_PLANETOID_RAW = "{0}/raw/ind.{1}.x, .tx, .allx, .y, .ty, .ally, .graph and .test.index"
_OGB_RAW = "{0}/raw and {0}/split as unpacked from the OGB archive"
_SOURCES = {
    "citeseer": _Source(_planetoid, "CiteSeer", _PLANETOID_RAW.format("CiteSeer", "citeseer")),
    "cora": _Source(_planetoid, "Cora", _PLANETOID_RAW.format("Cora", "cora")),
    "pubmed": _Source(_planetoid, "PubMed", _PLANETOID_RAW.format("PubMed", "pubmed")),
    "computers": _Source(_amazon, "Computers", "Computers/raw/amazon_electronics_computers.npz"),
    "reddit": _Source(_reddit, "Reddit", "Reddit/raw/reddit_data.npz and reddit_graph.npz"),
    "reddit2": _Source(_reddit, "Reddit2", "Reddit2/raw/adj_full.npz, feats.npy, class_map.json and role.json"),
    "ogbn-arxiv": _Source(_ogb, "ogbn-arxiv", _OGB_RAW.format("ogbn_arxiv")),
    "ogbn-products": _Source(_ogb, "ogbn-products", _OGB_RAW.format("ogbn_products")),
}


def load_graph(dataset: str, root: Path | None, seed: int = 0) -> Graph:
    """Load a data set by name, from an ``.npz`` file, or from a store.

    The file holds CSR matrices adj and attr (``adj_data``, ``adj_indices``, ``adj_indptr``, ``adj_shape``, ...) and
    integer ``labels``, as ``torch_geometric.io.read_npz`` takes it. Features keep their values; PyG makes those above
    0 ones.

    Args:
        dataset: "synthetic", a name of the list above, a path that ends in ``.npz``, or the folder of a store.
        root: folder of the named data sets. Raw files found there are used, others are downloaded by PyG or
            ogb, which also write a ``processed`` folder beside ``raw``.
        seed: of the synthetic graph.

    Raises:
        FileNotFoundError, ValueError: no such data, or some that is damaged; names the file.
        OSError, ImportError: it cannot be read, or not without another package.
    """
    if dataset == "synthetic":
        return synthetic_graph(seed=seed)
    if dataset.endswith(".npz"):
        return _load_npz(Path(dataset))
    source = _SOURCES.get(dataset)
    if source is None and Path(dataset).is_dir():
        from megagraph.data.store import open_store

        return open_store(Path(dataset))
    if source is None:
        names = ", ".join(["synthetic", *_SOURCES])
        raise ValueError(f"expected one of {names}, a path to an .npz file, or a store folder, got {dataset!r}")
    if root is None:
        raise ValueError(f"expected a folder for {dataset}, got none; name it with --root")
    try:
        return source.load(Path(root), source.name)
    except (ImportError, ValueError):
        raise
    except Exception as error:  # whatever the downloading library raises
        raise OSError(
            f"could not read or download {dataset}: {error}; expected the raw files {Path(root) / source.raw}"
        ) from error


def _load_npz(path: Path) -> Graph:
    if not path.is_file():
        raise FileNotFoundError(f"expected an .npz file, got {path}, which does not exist or is no file")
    values = _read_npz(path)
    try:
        adjacency, x = _csr(values, "adj", np.float64), _csr(values, "attr", np.float32)
        _refuse_weights("adj_data", adjacency.data)
        _check_memory(4 * x.shape[0] * x.shape[1], f"features of shape {list(x.shape)}")
        edge_index = np.stack(adjacency.tocoo().coords).astype(np.int64)
        return Graph._from_arrays(path.stem, x.toarray(), edge_index, values["labels"], None)
    except (ValueError, MemoryError) as error:
        raise ValueError(f"{path}: {error or 'it takes more memory than there is'}") from error


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    keys = [f"{key}_{part}" for key in ("adj", "attr") for part in ("data", "indices", "indptr", "shape")]
    values = {}
    try:
        with zipfile.ZipFile(path) as archive:
            _check_memory(sum(entry.file_size for entry in archive.infolist()), "arrays")
            for key in (*keys, "labels"):
                with archive.open(f"{key}.npy") as file:
                    values[key] = np.lib.format.read_array(file, allow_pickle=False)
    except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds for a damaged file
        why = error.args[0] if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(
            f"expected {path} to hold adj_data, adj_indices, adj_indptr, adj_shape, the same four of attr, and "
            f"labels; {why}"
        ) from error
    return values


def _check_memory(needed: int, what: str) -> None:
    if needed > (total := psutil.virtual_memory().total):
        raise ValueError(f"expected {what} that fit into {total:,} bytes of memory, got {needed:,} bytes")


def _csr(values: dict[str, np.ndarray], key: str, dtype: type) -> sp.csr_array:
    for part in ("data", "indices", "indptr", "shape"):
        array = values[f"{key}_{part}"]
        kinds, what = ("biuf", "numbers") if part == "data" else ("iu", "integers")
        if array.dtype.kind not in kinds or array.ndim != 1:
            raise ValueError(f"expected {key}_{part} of {what}, [n], got {array.dtype} {list(array.shape)}")
    sizes = values[f"{key}_shape"].tolist()
    if len(sizes) != 2 or not all(0 <= size < 1 << 31 for size in sizes):
        raise ValueError(f"expected two sizes below 2^31 in {key}_shape, got {sizes[:3]}")
    with np.errstate(over="ignore"):  # what is too large is infinite then, and refused
        data: np.ndarray = values[f"{key}_data"].astype(dtype)
    indices, indptr = (values[f"{key}_{part}"].astype(np.int64) for part in ("indices", "indptr"))
    try:
        matrix = sp.csr_array((data, indices, indptr), shape=tuple(sizes))
        matrix.check_format(full_check=True)
    except ValueError as error:
        raise ValueError(f"expected {key} to be a CSR matrix, got one that is none: {error}") from error
    return matrix


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
    return Graph._from_arrays("synthetic", features[old_id], new_id[np.stack([row, col])], labels[old_id], None)
