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
                                        scaled by part size^-1/2, D the row sums (ANS-GT)
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


def coarsen(graph: Graph, num_parts: int) -> Coarsening:
    """Merge the graph into at most ``num_parts`` super nodes; the same graph gives the same parts."""
    membership = partition(graph, num_parts)
    size = np.bincount(membership).astype(np.float32)
    members = (np.ones(graph.num_nodes, np.float32), membership, np.arange(graph.num_nodes + 1))
    one_hot = sp.csr_array(members, shape=(graph.num_nodes, len(size)))
    scaled = one_hot @ sp.diags_array(size**-0.5)
    coarse = scaled.T @ graph.adjacency @ scaled
    return Coarsening(
        membership=membership,
        features=part_sums(graph, membership) / size[:, None],
        adjacency=normalized_adjacency(coarse),
    )


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
