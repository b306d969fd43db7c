"""Whom a target node attends to: personalised PageRank by push, and weighted sampling from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from megagraph.data.datasets import Graph


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbors:
    """Candidates of S sources as CSR rows: indptr [S + 1] int64, nodes int32, weights float32 (> 0)."""

    indptr: np.ndarray
    nodes: np.ndarray
    weights: np.ndarray


def personalized_pagerank(
    graph: Graph,
    nodes: np.ndarray | None = None,
    *,
    alpha: float = 0.15,
    epsilon: float = 1e-4,
    max_candidates: int = 128,
    chunk: int = 1024,
) -> Neighbors:
    """The strongest ``max_candidates`` other nodes of every source by personalised PageRank.

    Approximates rows of ANS-GT's matrix alpha (I - (1 - alpha) D^-1/2 (A + I) D^-1/2)^-1, D the degrees of
    A + I, by the push method (Andersen, Chung & Lang 2006): while a node's residual exceeds epsilon * degree,
    a share alpha of it settles there and the rest moves on to the neighbours; in the end the share alpha of
    what is left settles too. All such nodes of a chunk of sources push at once. A source costs
    O(1 / (alpha * epsilon)) plus its own degree, whatever the size of the graph.

    A weight is below the exact entry (i, j) by at most epsilon * sqrt(d_i d_j), and never above it.

    Args:
        nodes: the source of every row of the result; None takes all nodes in order.
    """
    sources = np.arange(graph.num_nodes) if nodes is None else np.asarray(nodes)
    looped = graph.adjacency + sp.eye_array(graph.num_nodes, format="csr")
    degree = np.asarray(looped.sum(axis=1))
    walk = sp.csr_array(sp.diags_array(1 / degree) @ looped)
    counts, columns, weights = [], [], []
    for start in range(0, len(sources), chunk):
        source = sources[start : start + chunk]
        settled = _push(source, walk, alpha, epsilon * degree)
        row, col = settled.row, settled.col
        # from the random walk D^-1 (A + I) to ANS-GT's symmetric normalisation
        weight = settled.data * np.sqrt(degree[source[row]] / degree[col])
        weight[col == source[row]] = 0
        order = np.lexsort((-weight, row))
        size = np.bincount(row, minlength=len(source))
        rank = np.arange(len(row)) - np.repeat(np.cumsum(size) - size, size)
        keep = order[(rank < max_candidates) & (weight[order] > 0)]
        counts.append(np.bincount(row[keep], minlength=len(source)))
        columns.append(col[keep].astype(np.int32))
        weights.append(weight[keep].astype(np.float32))
    return Neighbors(
        indptr=np.cumsum(np.concatenate([[0], *counts])),
        nodes=np.concatenate(columns),
        weights=np.concatenate(weights),
    )


def _push(sources: np.ndarray, walk: sp.csr_array, alpha: float, threshold: np.ndarray) -> sp.coo_array:
    """Random-walk PageRank of S sources, [S, V]; pushes until no residual is above its node's threshold [V]."""
    shape = (len(sources), len(threshold))
    settled: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def settle(rows: np.ndarray, residual: sp.csr_array) -> None:
        settled.append((np.repeat(rows, np.diff(residual.indptr)), residual.indices, alpha * residual.data))

    rows = np.arange(len(sources))
    pushed = sp.csr_array((np.ones(len(sources)), sources, np.arange(len(sources) + 1)), shape=shape)
    waiting = sp.csr_array(shape)
    while len(rows):
        settle(rows, pushed)
        residual = sp.csr_array(waiting + (1 - alpha) * (pushed @ walk))
        above = residual.data > threshold[residual.indices]
        waiting, pushed = _where(residual, ~above), _where(residual, above)
        # rows never touch each other: one with nothing to push is finished. What waits there settles its share
        # too, which keeps the bound; without it the neighbours of a hub, each below its threshold, would be lost
        active = np.diff(pushed.indptr) > 0
        settle(rows[~active], waiting[~active])
        rows, waiting, pushed = rows[active], waiting[active], pushed[active]
    row, col, value = (np.concatenate(arrays) for arrays in zip(*settled, strict=True))
    return sp.csr_array((value, (row, col)), shape=shape).tocoo()


def _where(matrix: sp.csr_array, keep: np.ndarray) -> sp.csr_array:
    """The entries of ``matrix`` whose flag [nnz] is set."""
    indptr = np.concatenate([[0], np.cumsum(keep)])[matrix.indptr]
    return sp.csr_array((matrix.data[keep], matrix.indices[keep], indptr), shape=matrix.shape)


def sample_neighbors(
    neighbors: Neighbors, targets: np.ndarray, num_samples: int, k: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw k candidates per target and sample, without replacement, by weight -> int64 [B, num_samples, k].

    The k smallest of Exp(1) / weight are such a draw (Efraimidis & Spirakis 2006). A target with fewer than k
    candidates gives all of them and then -1: a short list is masked, never filled up.

    Args:
        targets: [B], rows of ``neighbors``.
    """
    start, stop = neighbors.indptr[targets], neighbors.indptr[targets + 1]
    width = max(k, int((stop - start).max(initial=0)))
    slot = start[:, None] + np.arange(width)
    listed = slot < stop[:, None]
    weight = np.zeros(slot.shape, np.float32)
    weight[listed] = neighbors.weights[slot[listed]]
    candidate = np.full(slot.shape, -1, np.int64)
    candidate[listed] = neighbors.nodes[slot[listed]]
    arrival = rng.standard_exponential((len(targets), num_samples, width), np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        arrival /= weight[:, None]
    chosen = np.argpartition(arrival, k - 1, axis=-1)[..., :k]
    first = np.argsort(np.take_along_axis(arrival, chosen, axis=-1), axis=-1)
    chosen = np.take_along_axis(chosen, first, axis=-1)
    return np.take_along_axis(candidate[:, None], chosen, axis=-1)
