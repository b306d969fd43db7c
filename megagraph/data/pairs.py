"""Which pairs of nodes attend where the whole graph is one sequence, and their buckets, linear in pairs.

A~ = D^-1/2 (A + I) D^-1/2. The buckets, with M = max_distance + 2 coarse distances (``DistanceBuckets``):

    0                               a node and itself
    1 + 8 (h - 1) + c               two nodes h = 1..hops apart, whose A~^h is in class c
    1 + 8 hops + c                  two nodes further apart, the second among the ``top`` of the first by PageRank
    then M                          a super node and another node: hops between their super nodes, but
    then 1                          a regular node and the super node that it belongs to
    then 1                          a global token and any node

Class c has what is above 2^-(c + 2), from 1/4 on; the last one what is left. Pairs of several kinds are of the first.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.sparse as sp
import torch

from megagraph.attention.bias import BorderedData
from megagraph.attention.layout import NodeLayout
from megagraph.attention.relation import Relation
from megagraph.data.coarsen import Coarsening, normalized_adjacency
from megagraph.data.graph import Graph
from megagraph.data.options import PAIR_CLASSES, BatchOptions
from megagraph.data.sample import Pagerank
from megagraph.data.structure import CoarseBuckets

_LARGEST = 2  # octaves below 1, from which classes begin
_LIST_BYTES = 4 * 4 + 1  # of a pair: column, row, place, and while they are made a key; its bucket


class PairBuckets:
    """The pairs of a whole graph, and the buckets of ``BorderedData``.

    Args:
        order: [V], the node at every regular slot.
        options: nodes ``hops`` apart or less attend to each other, and a node to the ``top`` others that are nearest
            by personalised PageRank; more than ``max_pairs`` are refused, before they are made if that can be told.

    Raises:
        ValueError: there are more pairs.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        order: np.ndarray,
        options: BatchOptions,
    ) -> None:
        self.max_distance, self.global_tokens = options.max_distance, options.global_tokens
        hops, top = options.hops, options.top
        self._coarse = CoarseBuckets(coarsening, options.max_distance)
        self._log_super = round(math.log(options.num_super), 3)
        self._first_coarse = options.num_pair_buckets
        self.size = options.num_full_buckets
        self.order = order
        self._hops_of_buckets = [0, *np.repeat(np.arange(1, hops + 1 + (top > 0)), PAIR_CLASSES).tolist()]
        rows, columns, buckets = _pairs(graph, hops, top, options.max_pairs)
        place = np.argsort(order)
        index = sp.csr_array((buckets, (place[rows], place[columns])), shape=(graph.num_nodes, graph.num_nodes))
        index.sort_indices()
        csr = (torch.from_numpy(index.indptr), torch.from_numpy(index.indices), torch.from_numpy(index.data))
        self.relation, self.index = Relation.from_lists("the pairs of the graph", *csr, graph.num_nodes)
        self._built: BorderedData | None = None

    @property
    def start(self) -> tuple[float, ...]:
        """Minus the distance of every bucket; super nodes and tokens, which all see, weigh together as one would."""
        distances = [*range(self.max_distance + 2), 0, 0]
        return (*(-float(h) for h in self._hops_of_buckets), *(-self._log_super - d for d in distances))

    @property
    def num_pairs(self) -> int:
        return len(self.index)

    def num_bytes(self, num_sequences: int, layout: NodeLayout) -> int:
        """Of the data of a batch."""
        block, starts = layout.block(), self.relation.row_starts
        pairs = int(starts[block.stop] - starts[block.start])
        borders = layout.num_super * (len(block) + layout.num_local)
        return pairs * _LIST_BYTES + borders + 8 * (len(block) + layout.num_nodes)

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> BorderedData:
        """A rank's part of the only sequence, regular nodes [1, V] in ``order`` and super nodes [1, s]."""
        if self._built is None:
            n, s = layout.num_nodes, supers.shape[1]
            rows = np.full((1, layout.num_super, layout.num_columns), self.size - 1, np.uint8)
            rows[:, :s, : n + s] = self._coarse(regular, supers) + np.uint8(self._first_coarse)
            columns = np.ascontiguousarray(rows[:, :, :n].swapaxes(1, 2))
            self._built = BorderedData(self.relation, self.index, torch.from_numpy(columns), torch.from_numpy(rows))
        return self._built.shard(layout)

    def __str__(self) -> str:
        each = self.num_pairs / len(self.order)
        return f"{self.num_pairs:,} pairs of nodes attend, {each:.1f} a node, beside the super nodes"


def _pairs(graph: Graph, hops: int, top: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and buckets uint8 of all pairs, by row and column, each once."""
    adjacency = normalized_adjacency(graph.adjacency)
    own = np.arange(graph.num_nodes)
    found = [(own * graph.num_nodes + own, np.zeros(graph.num_nodes, np.uint8))]
    power = adjacency
    for hop in range(1, hops + 1):
        if hop > 1:
            _check_count(_least_products(power, adjacency), most, hop, top)
            power = sp.csr_array(power @ adjacency)
        found.append(_keys(power, 1 + PAIR_CLASSES * (hop - 1)))
        _check_count(power.nnz, most, hop, top)
    if top:
        near = Pagerank(graph, max_candidates=top).push(own)
        listed = sp.csr_array((near.weights, near.nodes, near.indptr), shape=adjacency.shape)
        found.append(_keys(listed, 1 + PAIR_CLASSES * hops))
    keys, first = np.unique(np.concatenate([key for key, _ in found]), return_index=True)
    _check_count(len(keys), most, hops, top)
    return keys // graph.num_nodes, keys % graph.num_nodes, np.concatenate([bucket for _, bucket in found])[first]


def _keys(matrix: sp.csr_array, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Row * V + column of every entry, and its bucket."""
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    octave = np.floor(-np.log2(np.maximum(matrix.data, np.finfo(np.float32).tiny))).astype(np.int64)
    classes = np.clip(octave - _LARGEST, 0, PAIR_CLASSES - 1)
    return rows * matrix.shape[1] + matrix.indices, (first + classes).astype(np.uint8)


def _least_products(power: sp.csr_array, adjacency: sp.csr_array) -> int:
    """Entries that a product has at least: those of the largest row that each row meets."""
    lengths = np.diff(adjacency.indptr)
    return int(np.maximum.reduceat(lengths[power.indices], power.indptr[:-1]).sum())


def _check_count(count: int, most: int, hops: int, top: int) -> None:
    if count > most:
        raise ValueError(
            f"expected at most {most:,} pairs of nodes, got {count:,} or more with --hops {hops} and --top {top}, "
            f"{count * _LIST_BYTES / 2**30:.1f} GiB; take fewer of both, or raise --max-pairs"
        )
