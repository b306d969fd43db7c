"""What a graph is: one validated form for node classification, and its split."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import xxhash

from megagraph.data.names import Names
from megagraph.flags import listed
from megagraph.progress import log

MAX_CLASSES = 1 << 24
PARTS = ("train", "val", "test")
_CHUNK_ENTRIES = 1 << 16
_FLOATS = torch.float32, torch.float64  # of numpy; of SciPy, that has no halves, too


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Sorted node ids (int64) to train on, to select by, and to report on."""

    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


def random_split(labels: np.ndarray, seed: int) -> Split:
    """The labelled nodes at random: three fifths to train, a fifth to validate, the others to test."""
    nodes = np.random.default_rng(seed).permutation(np.flatnonzero(labelled(labels)))
    cuts = np.rint(np.cumsum([0.6, 0.2]) * len(nodes)).astype(np.int64)
    return Split(*(np.sort(part) for part in np.split(nodes, cuts)))


def labelled(labels: np.ndarray) -> np.ndarray:
    """Which nodes have a class, or of several labels one that is known: bool [V]."""
    return np.asarray((labels if labels.ndim == 1 else labels.max(axis=1)) >= 0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Graph:
    """An undirected graph with node features and labels, checked once, here.

    V nodes, E directed edges: both directions of every edge are stored.

    Args:
        name: what to call it.
        indptr: int64 [V + 1], CSR row starts.
        indices: int32 [E], neighbours, ascending in every row, no self loops, no duplicates.
        features: finite, float32 or float16 [V, d_in], or a float32 CSR matrix.
        labels: int64 [V], class, -1 = not labelled; or, of several labels a node, int8 [V, C], 1 = has it, 0 = has it
            not, -1 = not known.
        num_classes: classes are 0 to one less; or how many labels, C.
        split: the data set's own, no node twice in it; kept sorted, as int64. ``None`` where it has none.
        names: of nodes, classes and columns, of a graph from tables.

    Raises:
        ValueError: a graph without nodes or edges, or numbers that are not as said.

    Examples:
        >>> edge_index = torch.tensor([[0, 1], [1, 2]])
        >>> graph = mg.Graph.from_data(Data(x=torch.randn(3, 8), edge_index=edge_index, y=torch.tensor([0, 1, -1])))
        >>> graph.num_nodes, graph.num_edges, graph.num_classes
        (3, 4, 2)
    """

    name: str
    indptr: np.ndarray
    indices: np.ndarray
    features: np.ndarray | sp.csr_array
    labels: np.ndarray
    num_classes: int
    split: Split | None = None
    names: Names | None = None

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
        shape = (self.num_nodes, self.num_classes) if self.multi_label else (self.num_nodes,)
        if self.labels.shape != shape:
            raise ValueError(f"expected labels of shape {list(shape)}, got {list(self.labels.shape)}")
        if self.multi_label and self.labels.dtype != np.int8:
            raise ValueError(f"expected several labels a node as int8, got {self.labels.dtype}; convert them")
        self._check_values()

    def _check_values(self) -> None:
        low, high = int(self.labels.min()), int(self.labels.max())
        most = 1 if self.multi_label else self.num_classes - 1
        if low < -1 or high > most:
            raise ValueError(f"expected labels in 0..{most}, or -1 for unlabelled, got {low}..{high}; relabel them")
        if self.num_classes > MAX_CLASSES:
            raise ValueError(
                f"expected at most {MAX_CLASSES:,} classes, got {self.num_classes:,}; number them without gaps"
            )
        if self.split is not None:
            object.__setattr__(self, "split", _checked(self.split, self.num_nodes))

    @property
    def num_nodes(self) -> int:
        """V."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Directed edges: twice the number of undirected ones."""
        return len(self.indices)

    @property
    def multi_label(self) -> bool:
        """Whether a node has several labels, each of its own, in place of one class."""
        return self.labels.ndim == 2

    @property
    def in_features(self) -> int:
        """d_in."""
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

        The same source always has the same; the same numbers have another one in a store, or of another dtype.
        """
        x, split = self.features, [] if self.split is None else [getattr(self.split, part) for part in PARTS]
        features = [x.indptr, x.indices, x.data] if isinstance(x, sp.csr_array) else [x]
        digest = xxhash.xxh3_128(repr((self.num_classes, x.shape)).encode())
        for array in (self.indptr, self.indices, self.labels, *features, *split):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @classmethod
    def from_data(cls, data: Any, name: str = "graph", seed: int = 0) -> Graph:
        """Take a ``torch_geometric.data.Data``, or anything with its attributes, or an item of an OGB data set.

        Args:
            data: ``x`` [V, d_in], dense or sparse, or ``num_nodes`` of nodes without features (for a learned
                embedding), ``edge_index`` [2, E] and, to train on, ``y``: classes, integers [V]
                or [V, 1], or several labels a node [V, C] of any type, 1 or 0, NaN or -1 where not known; optionally
                ``train_mask``, ``val_mask`` and ``test_mask`` [V], true or false, or, for n splits, [V, n].
                Or (graph, labels) as of ``ogb.nodeproppred.NodePropPredDataset``.
                Directed edges are made undirected, self loops are dropped and duplicates merged; weighted edges are
                refused, and so are numbers to predict.
            name: what to call it.
            seed: takes split number ``seed`` modulo n.

        Raises:
            ValueError: an attribute that is missing or not as said; it is named.
        """
        if isinstance(data, tuple):
            graph, labels = data
            if graph.get("edge_feat") is not None:
                check_unweighted("edge_feat", graph["edge_feat"])
            if graph.get("node_feat") is None:
                raise ValueError("expected node_feat of shape [V, d_in], got none; put features of the nodes there")
            return cls.from_arrays(name, graph["node_feat"], graph["edge_index"], labels)
        edge_index = _attribute(data, "edge_index")
        if getattr(data, "x", None) is None and isinstance(number := getattr(data, "num_nodes", None), int):
            x = np.zeros((number, 0), np.float32)
        else:
            x = _attribute(data, "x")
        num_nodes = x.shape[0] if x.ndim else 0
        y = np.full(num_nodes, -1) if getattr(data, "y", None) is None else _attribute(data, "y")
        for key in ("edge_weight", "edge_attr"):
            if getattr(data, key, None) is not None:
                check_unweighted(f"data.{key}", _attribute(data, key))
        masks = [key for part in PARTS if getattr(data, key := f"{part}_mask", None) is not None]
        split = None
        if 0 < len(masks) < len(PARTS):
            log.warning(f"the split of {name} is left aside: it has {listed(masks)}, and not one for each of its parts")
        if len(masks) == len(PARTS):
            split = Split(*(_nodes_in(data, key, num_nodes, seed) for key in masks))
        return cls.from_arrays(name, x, edge_index, y, split)

    @classmethod
    def from_arrays(
        cls, name: str, x: np.ndarray, edge_index: np.ndarray, y: np.ndarray, split: Split | None = None
    ) -> Graph:
        """From NumPy arrays (of tensors: ``from_data``): features [V, d_in], dense or sparse ones of SciPy, edges
        [2, E] in any order and number, and labels as ``from_data`` takes them, [V], [V, 1] or [V, C].

        Raises:
            ValueError: an array of another shape or dtype, a feature that is not finite, an edge of no node.
        """
        if y.ndim == 2 and y.shape[1] == 1:
            y = y[:, 0]
        if y.ndim == 2 and y.shape[1]:
            y = _several_labels(y)
        elif y.ndim != 1:
            raise ValueError(f"expected labels of shape [V], or [V, C] for several a node, got {list(y.shape)}")
        elif y.dtype.kind not in "biu":
            raise ValueError(
                f"expected integer labels, got {y.dtype}; number the classes 0, 1, ... and use -1 for none. Numbers to "
                "predict (regression) are not supported: cut them into classes"
            )
        else:
            y = y.astype(np.int64)
        if x.ndim != 2:
            raise ValueError(f"expected x of shape [V, d_in], got {list(x.shape)}; pass one row per node")
        if x.dtype.kind == "c":
            raise ValueError(f"expected x of real numbers, got {x.dtype}; pass real and imaginary part side by side")
        if edge_index.ndim != 2 or len(edge_index) != 2 or not np.issubdtype(edge_index.dtype, np.integer):
            raise ValueError(
                f"expected an integer edge_index of shape [2, E], got {edge_index.dtype} {list(edge_index.shape)}"
            )
        num_nodes = x.shape[0]
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
            num_classes=y.shape[1] if y.ndim == 2 else int(y.max(initial=-1)) + 1,
            split=split,
        )


def _checked(split: Split, num_nodes: int) -> Split:
    """The split with sorted ids, int64; ValueError unless each is of this graph, and there once."""
    parts = {part: np.asarray(getattr(split, part)) for part in PARTS}
    for part, nodes in parts.items():
        if nodes.ndim != 1 or (len(nodes) and nodes.dtype.kind not in "iu"):
            raise ValueError(
                f"expected node ids [n], integers, in the {part} part of the split, got {nodes.dtype} "
                f"{list(nodes.shape)}; np.flatnonzero makes them of a mask"
            )
        if len(nodes) and not 0 <= nodes.min() <= nodes.max() < num_nodes:
            raise ValueError(
                f"expected the {part} part of the split in 0..{num_nodes - 1}, got {nodes.min()}..{nodes.max()}; "
                "name nodes of this graph"
            )
    ordered = [np.sort(nodes).astype(np.int64, copy=False) for nodes in parts.values()]
    times = np.bincount(np.concatenate(ordered), minlength=num_nodes)
    if times.max() > 1:
        node = int(times.argmax())
        where = " and ".join(part for part, nodes in parts.items() if node in nodes)
        raise ValueError(
            f"expected every node at most once in the parts of the split, got node {node} again, in {where}; leave it "
            "in one"
        )
    return Split(*ordered)


def _several_labels(y: np.ndarray) -> np.ndarray:
    """0, 1, and -1 or NaN, as int8."""
    if y.dtype.kind not in "biuf":
        raise ValueError(f"expected several labels a node as numbers or booleans, got {y.dtype}")
    labels = np.full(y.shape, -1, np.int8)
    labels[y == 0], labels[y == 1] = 0, 1
    wrong = (labels < 0) & (y != -1) & ~np.isnan(y)
    if wrong.any():
        node, label = np.argwhere(wrong)[0]
        raise ValueError(
            f"expected several labels a node of shape {list(y.shape)} to be 0 or 1, or -1 or NaN where not known, got "
            f"{y[node, label]} in label {label} of node {node}; numbers to predict (regression) are not supported, and "
            "of several columns of classes take one"
        )
    return labels


def csr_arrays(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """indptr int64, indices int32, as compiled loops take them: no copy where they are; of mapped files plain views."""
    return np.asarray(indptr, np.int64), np.asarray(indices, np.int32)


def _attribute(data: Any, key: str) -> Any:
    """A tensor as a numpy array; a sparse ``x`` as a CSR matrix."""
    value = getattr(data, key, None)
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"expected data.{key} to be a tensor, got {type(value).__name__} of a {type(data).__name__}; a graph needs "
            "x and edge_index, and y to train on (of adj_t make edge_index, of a HeteroData a Data: to_homogeneous)"
        )
    dense = value.layout == torch.strided
    if value.is_floating_point() and value.dtype not in ((torch.float16,) if dense else ()) + _FLOATS:
        value = value.float()
    if dense:
        return value.numpy(force=True)
    if key != "x" or value.ndim != 2:
        return value.to_dense().numpy(force=True)
    value = value.to_sparse_coo().coalesce()
    entries = (value.values().numpy(force=True), tuple(value.indices().numpy(force=True)))
    return sp.coo_array(entries, shape=tuple(value.shape)).tocsr()


def _nodes_in(data: Any, key: str, num_nodes: int, seed: int) -> np.ndarray:
    """The ids of who is in a mask; of n masks, [V, n], in number ``seed`` modulo n."""
    given = _attribute(data, key)
    mask = given[:, seed % given.shape[1]] if given.ndim == 2 and given.shape[1] else given
    if mask.shape != (num_nodes,) or ((mask != 0) & (mask != 1)).any():
        raise ValueError(
            f"expected data.{key} of shape [{num_nodes}], or [{num_nodes}, n] for n splits, true or false, got "
            f"{given.dtype} {list(given.shape)}; of node ids make a mask"
        )
    return np.flatnonzero(mask)


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


def check_unweighted(name: str, weights: np.ndarray) -> None:
    """Raise ValueError that names the weights, unless all are equal."""
    if weights.size and (weights != weights.flat[0]).any():
        raise ValueError(
            f"expected an unweighted graph, got {name} with values of {weights.min():g}..{weights.max():g}; "
            "weighted edges and edge features are not supported: take them away, or drop the weakest edges"
        )
