"""Whom a target node attends to: personalised PageRank by push, and weighted sampling from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megagraph.data.coarsen import normalized_adjacency
from megagraph.data.graph import Graph

_MOST_EXACT_EDGES, _PROBES, _TOLERANCE = 2**21, 16, 1e-5
ALPHA = 0.15  # of a residual, what settles
MAX_STORED_SOURCES = 2**15  # graphs up to this size keep the candidates of all nodes: 32 MiB with 128 of each


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbors:
    """Candidates of S sources as CSR rows: indptr [S + 1] int64, nodes int32, weights float32 (> 0)."""

    indptr: np.ndarray
    nodes: np.ndarray
    weights: np.ndarray


class Pagerank:
    """The nodes nearest to any node by personalised PageRank, found around that node alone.

    Approximates rows of ANS-GT's matrix alpha (I - (1 - alpha) D^-1/2 (A + I) D^-1/2)^-1, D the degrees of
    A + I, by the push method (Andersen, Chung & Lang 2006): while a node's residual exceeds epsilon * degree,
    a share alpha of it settles there and the rest moves on to the neighbours; in the end the share alpha of
    what is left settles too. A source costs O(1 / (alpha * epsilon)) plus its own degree, whatever the size of
    the graph, and nothing is kept for a graph above MAX_STORED_SOURCES nodes.

    A weight is below the exact entry (i, j) by at most epsilon * sqrt(d_i d_j), and never above it.

    Args:
        max_candidates: how many other nodes to keep of every source, the strongest ones.
    """

    def __init__(self, graph: Graph, *, epsilon: float = 1e-4, max_candidates: int = 128) -> None:
        if epsilon <= 0 or max_candidates < 1:
            raise ValueError(f"expected epsilon > 0 and max_candidates >= 1, got {epsilon}, {max_candidates}")
        self.epsilon, self.max_candidates = epsilon, max_candidates
        self._graph = graph
        self._csr = np.asarray(graph.indptr), np.asarray(graph.indices)  # of a mapped file its plain view
        self._known = known_nodes(graph)
        self._stored: Neighbors | None = None
        if graph.num_nodes <= MAX_STORED_SOURCES:
            self._stored = self.push(np.arange(graph.num_nodes))

    def __call__(self, sources: np.ndarray) -> Neighbors:
        """The candidates of the nodes [S], strongest first."""
        if self._stored is None:
            return self.push(sources)
        start = self._stored.indptr[sources]
        indptr = np.concatenate([[0], np.cumsum(self._stored.indptr[sources + 1] - start)])
        position = np.arange(indptr[-1]) + np.repeat(start - indptr[:-1], np.diff(indptr))
        return Neighbors(indptr=indptr, nodes=self._stored.nodes[position], weights=self._stored.weights[position])

    def mass(self) -> float | None:
        """What part of the exact weight on other nodes the candidates hold, over some nodes together; ``None`` for a
        graph too large to say so in a second or two."""
        adjacency = self._graph.adjacency
        if adjacency.nnz > _MOST_EXACT_EDGES:
            return None
        num_nodes = adjacency.shape[0]
        some = np.random.default_rng(0).choice(num_nodes, min(_PROBES, num_nodes), replace=False)
        matrix, found = normalized_adjacency(adjacency), self(some)
        start = np.zeros((num_nodes, len(some)), np.float32)
        start[some, range(len(some))] = ALPHA
        exact = start
        for _ in range(math.ceil(math.log(_TOLERANCE) / math.log(1 - ALPHA))):
            exact = start + np.float32(1 - ALPHA) * (matrix @ exact)
        others = exact.sum(dtype=np.float64) - exact[some, range(len(some))].sum(dtype=np.float64)
        return float(found.weights.sum(dtype=np.float64) / others) if others > 0 else 1.0

    def push(self, sources: np.ndarray) -> Neighbors:
        """The candidates of the nodes [S], strongest first, computed now."""
        from megagraph.data import traversal

        counts, nodes, weights = traversal.pagerank(
            np.asarray(sources, np.int64), *self._csr, ALPHA, self.epsilon, self.max_candidates, self._known
        )
        return Neighbors(indptr=np.concatenate([[0], np.cumsum(counts)]), nodes=nodes, weights=weights)


def known_nodes(graph: Graph) -> np.ndarray:
    """What ``traversal.pagerank`` looks up of a node."""
    known = np.zeros((graph.num_nodes, 2), np.int32)
    known[:, 1] = np.diff(graph.indptr) + 1
    return known


def sample_neighbors(neighbors: Neighbors, sources: np.ndarray, num_samples: int, k: int, seed: int) -> np.ndarray:
    """Draw k candidates per source and sample, without replacement, by weight -> int64 [S, num_samples, k].

    The k smallest of Exp(1) / weight are such a draw (Efraimidis & Spirakis 2006). Each of them is a function of seed,
    source, number of the sample and candidate: what a source draws does not depend on who else is asked for. A source
    with fewer than k candidates gives all of them and then -1: a short list is masked, never filled up.

    Args:
        neighbors: the candidates of ``sources``, ids [S] of 0 or more.
        seed: in 0..2^64 - 1.
    """
    from megagraph.data.draw import first_arrivals

    drawn = np.empty((len(sources), num_samples, k), np.int64)
    candidates = neighbors.indptr, neighbors.nodes, neighbors.weights
    first_arrivals(np.uint64(seed), np.asarray(sources, np.int64), *candidates, drawn)
    return drawn
