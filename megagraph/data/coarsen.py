"""Clusters of nodes, super nodes made of clusters, and the coarse graph among super nodes."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy.sparse as sp

from megagraph.data import cache
from megagraph.data.graph import Graph, csr_arrays
from megagraph.data.metis import metis
from megagraph.data.store import StoredGraph

Method = Literal["auto", "metis", "propagation"]

_CHUNK_NODES = 1 << 16
_METIS_EDGES = 1 << 26  # directed ones; METIS takes about 80 bytes each
_MOST_HALVES = 1024  # nested parts of an order of clusters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Coarsening:
    """A partition of V nodes into P parts, none empty, and the coarse graph.

    Shapes:
        membership: [V]        int32    part of every node
        features:   [P, d_in]  float32  mean of the members' features
        adjacency:  [P, P]     float32  D^-1/2 (C + I) D^-1/2, C = S^T A S, S the membership with columns
                                        scaled by part size^-1/2, D the row sums (ANS-GT); maybe cut, see ``coarsen``
    """

    membership: np.ndarray
    features: np.ndarray
    adjacency: sp.csr_array

    @property
    def num_parts(self) -> int:
        return len(self.features)


def partition(graph: Graph, num_parts: int, method: Method = "auto") -> np.ndarray:
    """At most ``num_parts`` balanced parts with few edges between them -> int32 [V], none empty.

    Kept in the folder of a graph that comes from a store, and read from there the next time.

    Args:
        method: "metis" (``megagraph.data.metis``), "propagation" (``megagraph.data.propagate``), which takes far less
            memory, or "auto": METIS up to 2^26 directed edges.
    """
    if not 1 <= num_parts <= graph.num_nodes:
        raise ValueError(f"expected 1 <= num_parts <= {graph.num_nodes} nodes, got {num_parts}")
    if method == "auto":
        method = "metis" if graph.num_edges <= _METIS_EDGES else "propagation"

    def parts() -> np.ndarray:
        if method == "metis":
            return metis(num_parts, graph.indptr, graph.indices)
        from megagraph.data.propagate import propagate  # numba takes a second to import

        return propagate(graph.indptr, graph.indices, num_parts)

    return _kept(graph, num_parts, method, parts)


def nested_partition(graph: Graph, num_parts: int, sizes: np.ndarray) -> np.ndarray:
    """``partition`` into parts that balance ``sizes``, int [V], in an order that cuts few edges wherever it is cut."""

    def clusters() -> np.ndarray:
        if graph.num_edges <= _METIS_EDGES:
            return metis(num_parts, graph.indptr, graph.indices, sizes, nested=True)
        parts = partition(graph, num_parts, "propagation")
        weights = np.bincount(parts, weights=sizes).astype(np.int64)
        halves = _metis_of_parts(min(_MOST_HALVES, len(weights)), quotient(graph, parts), weights, nested=True)
        return np.argsort(np.argsort(halves, kind="stable"))[parts].astype(np.int32)

    return _kept(graph, num_parts, f"nested-{_digest(sizes)}", clusters)


def _kept(graph: Graph, num_parts: int, kind: str, make: Callable[[], np.ndarray]) -> np.ndarray:
    """The parts that ``make`` makes, read from the folder of the graph where they are kept there."""
    if num_parts == 1:
        return np.zeros(graph.num_nodes, np.int32)
    name = f"partition-{kind}-{num_parts}-{graph.fingerprint()}.npy"
    if isinstance(graph, StoredGraph):
        kept = cache.load(graph.store, name, (graph.num_nodes,), np.dtype("<i4"))
        if kept is not None and _is_partition(kept, num_parts):
            return kept
    parts = make()
    if isinstance(graph, StoredGraph):
        with contextlib.suppress(OSError):  # the folder may be read-only
            cache.save(graph.store, {name: parts.astype("<i4", copy=False)})
    return parts


def _digest(values: np.ndarray) -> str:
    return f"{zlib.crc32(np.ascontiguousarray(values).data):08x}"


def _is_partition(parts: np.ndarray, num_parts: int) -> bool:
    """Whether parts are at most ``num_parts``, numbered without gaps."""
    return 0 <= parts.min() <= parts.max() < num_parts and bool(np.bincount(parts).all())


def merge(graph: Graph, clusters: np.ndarray, edges: sp.csr_array, num_parts: int) -> tuple[np.ndarray, sp.csr_array]:
    """Merge clusters [V] into at most ``num_parts`` balanced super nodes with few edges between; kept as a partition.

    Args:
        edges: between the clusters, their ``quotient``.

    Returns:
        the super node of every node, int32 [V], and the edges between super nodes.
    """
    size = np.bincount(clusters)
    if len(size) <= num_parts:
        return clusters, edges
    kind = f"super-{_digest(clusters)}"
    supers = _kept(graph, num_parts, kind, lambda: _metis_of_parts(num_parts, edges, size)[clusters])
    parts = np.empty(len(size), np.int32)
    parts[clusters] = supers
    one_hot = sp.csr_array((np.ones(len(size), np.float32), parts, np.arange(len(size) + 1)))
    merged = sp.csr_array(one_hot.T @ edges @ one_hot)
    merged.sort_indices()
    return supers, merged


def _metis_of_parts(num_parts: int, edges: sp.csr_array, sizes: np.ndarray, *, nested: bool = False) -> np.ndarray:
    """Parts of parts, by the edges between these, their ``quotient``."""
    between = edges.copy()
    between.setdiag(0)
    between.eliminate_zeros()
    weights = between.data.astype(np.int64)
    return metis(num_parts, between.indptr, between.indices, sizes, weights, nested=nested)


def quotient(graph: Graph, parts: np.ndarray) -> sp.csr_array:
    """Directed edges between every two parts, and inside each on the diagonal: float32 [P, P]."""
    from megagraph.data import traversal

    size = np.bincount(parts)
    members, starts = np.argsort(parts, kind="stable"), np.concatenate([[0], np.cumsum(size)])
    csr = traversal.quotient(*csr_arrays(graph.indptr, graph.indices), parts.astype(np.int32), members, starts)
    edges = sp.csr_array(csr, shape=(len(size), len(size)))
    edges.sort_indices()
    return edges


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How good a partition is."""

    parts: int
    edge_cut: float  # share of the edges
    balance: float  # largest part over the mean
    # share of the labelled nodes whose class is the most frequent one of their part; None of several labels a node
    homophily: float | None

    def __str__(self) -> str:
        homophily = "" if self.homophily is None else f", label homophily {self.homophily:.1%}"
        return (
            f"{self.parts:,} clusters, edge cut {self.edge_cut:.1%}, largest {self.balance:.2f} times the mean"
            f"{homophily}"
        )


def quality(graph: Graph, parts: np.ndarray, edges: sp.csr_array | None = None) -> Quality:
    """Quality of parts int [V]; reads the edges of the graph unless given their ``quotient``."""
    size = np.bincount(parts)
    edges = quotient(graph, parts) if edges is None else edges
    inside = int(edges.diagonal().sum(dtype=np.float64))
    homophily = None
    if not graph.multi_label:
        known = graph.labels >= 0
        classes = max(graph.num_classes, 1)  # of a graph to predict none may be known
        pairs = parts[known].astype(np.int64) * classes + graph.labels[known]
        by_class = np.bincount(pairs, minlength=len(size) * classes).reshape(len(size), -1)
        homophily = float(by_class.max(axis=1).sum() / max(known.sum(), 1))
    return Quality(
        parts=len(size),
        edge_cut=(graph.num_edges - inside) / max(graph.num_edges, 1),
        balance=float(size.max() / size.mean()),
        homophily=homophily,
    )


def coarsen(
    graph: Graph, membership: np.ndarray, *, edges: sp.csr_array | None = None, strongest: int | None = None
) -> Coarsening:
    """The coarse graph of a partition [V] whose parts are numbered without gaps.

    Args:
        edges: between the parts, their ``quotient``, where it is known.
        strongest: keep of the coarse adjacency the diagonal and what is among so many largest entries of its row or of
            its column; ``None`` keeps all. Uncut, that of large parts is nearly complete, and distance says nothing.
    """
    size = np.bincount(membership).astype(np.float32)
    scale = sp.diags_array(size**-0.5)
    edges = quotient(graph, membership) if edges is None else edges
    adjacency = normalized_adjacency(scale @ edges @ scale)
    return Coarsening(
        membership=membership,
        features=part_sums(graph, membership) / size[:, None],
        adjacency=adjacency if strongest is None else keep_strongest(adjacency, strongest),
    )


def nearest_parts(adjacency: sp.csr_array, count: int) -> np.ndarray:
    """Every part, then the others with the largest entries in its row -> int64 [P, count], -1 where there are fewer."""
    row, rank = _ranks(adjacency)
    near = np.full((adjacency.shape[0], count), -1)
    near[row[rank < count], rank[rank < count]] = adjacency.indices[rank < count]
    return near


def keep_strongest(matrix: sp.csr_array, count: int) -> sp.csr_array:
    """The diagonal of a symmetric matrix, and what is among the ``count`` largest others of its row or column."""
    _, rank = _ranks(matrix)
    largest = sp.csr_array(((rank <= count).astype(np.float32), matrix.indices, matrix.indptr), shape=matrix.shape)
    cut = sp.csr_array(matrix.multiply((largest + largest.T) > 0))
    cut.sort_indices()
    return cut


def _ranks(matrix: sp.csr_array) -> tuple[np.ndarray, np.ndarray]:
    """The row of every entry, and its rank there: 0 is the diagonal, then the others from the largest on."""
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    weight = np.where(row == matrix.indices, np.inf, matrix.data)
    rank = np.empty(len(row), np.int64)
    rank[np.lexsort((-weight, row))] = np.arange(len(row)) - matrix.indptr[row]  # of equals the first one
    return row, rank


def part_sums(graph: Graph, membership: np.ndarray) -> np.ndarray:
    """Features summed over the members of every part, float32 [P, d_in]; nodes are read in order, in chunks."""
    num_parts = int(membership.max()) + 1
    sums = np.zeros((num_parts, graph.in_features), np.float32)
    for start in range(0, graph.num_nodes, _CHUNK_NODES):
        nodes = np.arange(start, min(start + _CHUNK_NODES, graph.num_nodes))
        rows = np.empty((len(nodes), graph.in_features), np.float32)
        graph.read_features(nodes, rows)
        members = (np.ones(len(nodes), np.float32), (membership[nodes], nodes - start))
        sums += sp.csr_array(members, shape=(num_parts, len(nodes))) @ rows
    return sums


def normalized_adjacency(adjacency: sp.csr_array) -> sp.csr_array:
    """D^-1/2 (A + I) D^-1/2 in float32 with sorted rows, D the row sums of A + I."""
    looped = sp.csr_array(adjacency + sp.eye_array(adjacency.shape[0], dtype=np.float32, format="csr"))
    looped.sort_indices()
    scale = sp.diags_array(np.asarray(looped.sum(axis=1)).astype(np.float32) ** -0.5)
    return sp.csr_array(scale @ looped @ scale)
