"""Super nodes: METIS parts of the graph, and the coarse graph among them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from megagraph.data.datasets import Graph

_CHUNK_NODES = 1 << 16


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


def partition(graph: Graph, num_parts: int) -> np.ndarray:
    """Balanced parts with few edges between them (METIS, Karypis & Kumar 1998) -> int32 [V], no part empty."""
    import pymetis

    if not 1 <= num_parts <= graph.num_nodes:
        raise ValueError(f"expected 1 <= num_parts <= {graph.num_nodes} nodes, got {num_parts}")
    adjacency = pymetis.CSRAdjacency(graph.indptr, graph.indices)
    _, parts = pymetis.part_graph(num_parts, adjacency=adjacency, options=pymetis.Options(seed=0))
    # METIS may leave parts empty, above all where there are hardly more nodes than parts
    return np.unique(parts, return_inverse=True)[1].astype(np.int32)


def merge(graph: Graph, clusters: np.ndarray, num_parts: int) -> np.ndarray:
    """Merge clusters [V] into at most ``num_parts`` balanced super nodes with few edges between -> int32 [V]."""
    import pymetis

    size = np.bincount(clusters)
    if len(size) <= num_parts:
        return clusters
    between = quotient(graph, clusters)
    between.setdiag(0)
    between.eliminate_zeros()
    adjacency = pymetis.CSRAdjacency(between.indptr, between.indices)
    _, parts = pymetis.part_graph(
        num_parts,
        adjacency=adjacency,
        vweights=size,
        eweights=between.data.astype(np.int64),
        options=pymetis.Options(seed=0),
    )
    return np.unique(np.asarray(parts)[clusters], return_inverse=True)[1].astype(np.int32)


def quotient(graph: Graph, parts: np.ndarray) -> sp.csr_array:
    """Directed edges between every two parts, and inside each on the diagonal: float32 [P, P]."""
    members = (np.ones(graph.num_nodes, np.float32), parts, np.arange(graph.num_nodes + 1))
    one_hot = sp.csr_array(members, shape=(graph.num_nodes, int(parts.max()) + 1))
    edges = sp.csr_array(one_hot.T @ graph.adjacency @ one_hot)
    edges.sort_indices()
    return edges


def coarsen(graph: Graph, membership: np.ndarray, strongest: int | None = None) -> Coarsening:
    """The coarse graph of a partition [V] whose parts are numbered without gaps.

    Args:
        strongest: keep of the coarse adjacency the diagonal and what is among so many largest entries of its row or of
            its column; ``None`` keeps all. Uncut, that of large parts is nearly complete, and distance says nothing.
    """
    size = np.bincount(membership).astype(np.float32)
    scale = sp.diags_array(size**-0.5)
    adjacency = normalized_adjacency(scale @ quotient(graph, membership) @ scale)
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
    order = np.lexsort((matrix.indices, -matrix.data, row != matrix.indices, row))
    rank = np.empty(len(row), np.int64)
    rank[order] = np.arange(len(row)) - matrix.indptr[row]
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
