"""Which pairs of nodes attend where the whole graph is one sequence, and their buckets, linear in pairs.

A~ = D^-1/2 (A + I) D^-1/2. The buckets, with M = max_distance + 2 coarse distances (``DistanceBuckets``):

    0                               a node and itself
    1 + 8 (h - 1) + c               two nodes h = 1..hops apart, whose A~^h is in class c
    1 + 8 hops + c                  two nodes further apart, the second among the ``top`` of the first by PageRank
    then M                          a super node and another node: hops between their super nodes, but
    then 1                          a regular node and the super node that it belongs to
    then 1                          a global token and any node

Class c has what is above 2^-(c + 3), from 1/8 on; the last one what is left. Pairs of several kinds are of the first.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import scipy.sparse as sp
import torch
import xxhash

from megagraph.attention.bias import BorderedData
from megagraph.attention.layout import NodeLayout
from megagraph.attention.relation import Relation
from megagraph.data import cache
from megagraph.data.coarsen import Coarsening, normalized_adjacency
from megagraph.data.graph import Graph, csr_arrays
from megagraph.data.options import PAIR_CLASSES, BatchOptions
from megagraph.data.sample import Pagerank
from megagraph.data.store import StoredGraph
from megagraph.data.structure import CoarseBuckets, reach_of_some
from megagraph.flags import in_words

_KEPT = "pairs1"  # what they are called in a store; others of the same options need another number
_LARGEST = 2  # octaves below 1, from which classes begin: the first one ends an octave further below
_CHUNK = 1 << 22  # entries at a time
_LIST_BYTES = 4 * 4 + 1  # of a pair: its column, before pairs are joined and after, row and place; its bucket


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
        self.relation, self.index = _kept(graph, order, hops, top, options.max_pairs)
        self._slots = np.argsort(order)  # of every node
        self._last: tuple[np.ndarray, tuple[Relation, torch.Tensor]] | None = None

    @property
    def start(self) -> tuple[float, ...]:
        """Initial values: minus the distance of every bucket; super nodes and tokens weigh together as one would."""
        distances = [*range(self.max_distance + 2), 0, 0]
        return (*(-float(h) for h in self._hops_of_buckets), *(-self._log_super - d for d in distances))

    @property
    def num_pairs(self) -> int:
        return len(self.index)

    def num_bytes(self, num_sequences: int, layout: NodeLayout) -> int:
        """Bytes of a rank's data of a batch."""
        block, starts = layout.block(), self.relation.row_starts
        pairs = int(starts[block.stop] - starts[block.start])
        borders = layout.num_super * (len(block) + layout.num_local)
        return pairs * _LIST_BYTES + borders + 8 * (len(block) + layout.num_nodes)

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> BorderedData:
        """A rank's part of a sequence, regular nodes [1, N'] as they follow in ``order`` and super nodes [1, s]."""
        n, s = layout.num_nodes, supers.shape[1]
        rows = np.full((1, layout.num_super, layout.num_columns), self.size - 1, np.uint8)
        rows[:, :s, : n + s] = self._coarse(regular, supers) + np.uint8(self._first_coarse)
        columns = np.ascontiguousarray(rows[:, :, :n].swapaxes(1, 2))
        relation, index = self.among(self.slots(regular))
        return BorderedData(relation, index, torch.from_numpy(columns), torch.from_numpy(rows)).shard(layout)

    def slots(self, regular: np.ndarray) -> np.ndarray:
        """Slots of the nodes [1, N'], int64 [N']."""
        return self._slots[regular[0]]

    def among(self, slots: np.ndarray) -> tuple[Relation, torch.Tensor]:
        """The pairs of these slots, ascending, with each other, numbered from 0 on, and their buckets."""
        if len(slots) == len(self.order):
            return self.relation, self.index
        if self._last is None or not np.array_equal(self._last[0], slots):  # ranks cut by it what they then take of it
            lists = (x.numpy() for x in (self.index, self.relation.columns, self.relation.row_starts))
            some = sp.csr_array(tuple(lists), shape=2 * (len(self.order),))[slots][:, slots]
            starts, columns = torch.from_numpy(some.indptr).long(), torch.from_numpy(some.indices).int()
            self._last = slots, (Relation.of_rows(starts, columns, len(slots), 1), torch.from_numpy(some.data))
        return self._last[1]

    def __str__(self) -> str:
        each = self.num_pairs / len(self.order)
        return f"{self.num_pairs:,} pairs of nodes attend, {each:.1f} a node, beside the super nodes"


def _kept(graph: Graph, order: np.ndarray, hops: int, top: int, most: int) -> tuple[Relation, torch.Tensor]:
    """The pairs and their buckets, mapped from the folder of a graph that comes from a store, which keeps the last."""
    if not isinstance(graph, StoredGraph):
        return _made(graph, order, hops, top, most)
    key = xxhash.xxh3_128(f"{_KEPT} {hops} {top} {graph.fingerprint()}".encode())
    key.update(np.ascontiguousarray(order, np.int64).data)
    name = f"{_KEPT}-{key.hexdigest()}"
    mapped = _mapped(graph, name, hops, top, most)
    if mapped is not None:
        return mapped
    relation, index = _made(graph, order, hops, top, most)
    with suppress(OSError):  # the folder may be read-only, or full
        arrays = {f"{name}-{field}.npy": x.numpy() for field, x in (relation.lists | {"index": index}).items()}
        cache.save(graph.store, arrays, instead_of=f"{_KEPT}-")
    return _mapped(graph, name, hops, top, most) or (relation, index)


def _mapped(graph: StoredGraph, name: str, hops: int, top: int, most: int) -> tuple[Relation, torch.Tensor] | None:
    """What was kept by this name, or None."""

    def load(field: str, length: int, dtype: str) -> np.ndarray | None:
        return cache.load(graph.store, f"{name}-{field}.npy", (length,), np.dtype(dtype))

    starts = load("row_starts", graph.num_nodes + 1, "<i8")
    if starts is None:
        return None
    _check_count(int(starts[-1]), most, hops, top)
    lists = {field: load(field, int(starts[-1]), "<i4") for field in ("columns", "key_rows", "key_pairs")}
    lists |= {"row_starts": starts, "key_starts": load("key_starts", graph.num_nodes + 1, "<i8")}
    lists |= {"index": load("index", int(starts[-1]), "|u1")}
    found = {field: torch.from_numpy(x) for field, x in lists.items() if x is not None}
    if len(found) < len(lists):
        return None
    index = found.pop("index")
    return Relation(**found, num_columns=graph.num_nodes), index


def _made(graph: Graph, order: np.ndarray, hops: int, top: int, most: int) -> tuple[Relation, torch.Tensor]:
    starts, columns, buckets = map(torch.from_numpy, _pairs(graph, order, hops, top, most))
    return Relation.from_lists("the pairs of the graph", starts, columns, buckets, graph.num_nodes)


def _pairs(
    graph: Graph, order: np.ndarray, hops: int, top: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row starts int64, columns int32 and buckets uint8 of all pairs, each once, in slots."""
    from megagraph.data import union  # numba takes a second to import

    adjacency = normalized_adjacency(graph.adjacency)
    found, power = [], adjacency
    for hop in range(1, hops + 1):
        if hop > 1:
            _check_count(_least_products(power, adjacency), most, hop, top)
            _check_reach(graph, hop, most, top)
            power = sp.csr_array(power @ adjacency)
        _check_count(power.nnz, most, hop, top)
        found.append(_classified(power, 1 + PAIR_CLASSES * (hop - 1)))
    del power, adjacency
    if top:
        near = Pagerank(graph, max_candidates=top).push(np.arange(graph.num_nodes))
        listed = sp.csr_array((near.weights, near.nodes, near.indptr), shape=(graph.num_nodes, graph.num_nodes))
        found.append(_classified(listed, 1 + PAIR_CLASSES * hops))
    starts = np.stack([starts for starts, _, _ in found])
    columns = np.concatenate([columns for _, columns, _ in found])
    buckets = np.concatenate([buckets for _, _, buckets in found])
    firsts = np.concatenate([[0], starts[:-1, -1].cumsum()])
    del found
    row_starts = np.concatenate([[0], union.count_union(order, starts, columns, firsts).cumsum()])
    _check_count(int(row_starts[-1]), most, hops, top)
    out = np.empty(row_starts[-1], np.int32), np.empty(row_starts[-1], np.uint8)
    place = np.argsort(order).astype(np.int32)
    union.union(order, place, starts, columns, buckets, firsts, row_starts, out)
    return row_starts, *out


def _classified(matrix: sp.csr_array, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row starts int64 and columns int32 of a matrix, and buckets of its entries, whose classes begin at ``first``."""
    buckets = np.empty(matrix.nnz, np.uint8)
    for start in range(0, matrix.nnz, _CHUNK):
        some = matrix.data[start : start + _CHUNK]
        octave = np.floor(-np.log2(np.maximum(some, np.finfo(np.float32).tiny)))
        buckets[start : start + _CHUNK] = first + np.clip(octave - _LARGEST, 0, PAIR_CLASSES - 1)
    return matrix.indptr.astype(np.int64), matrix.indices.astype(np.int32, copy=False), buckets


def _least_products(power: sp.csr_array, adjacency: sp.csr_array) -> int:
    """Entries that a product has at least: those of the largest row that each row meets."""
    lengths = np.diff(adjacency.indptr)
    return int(np.maximum.reduceat(lengths[power.indices], power.indptr[:-1]).sum())


def _check_reach(graph: Graph, hop: int, most: int, top: int) -> None:
    """Refuse more pairs than may be, by those of some nodes, and of all where these do not tell."""
    from megagraph.data import traversal

    arrays, num_nodes = csr_arrays(graph.indptr, graph.indices), graph.num_nodes
    about = int(reach_of_some(arrays, hop))
    if about > 4 * most:
        _check_count(about, most, hop, top, "about ")
    elif about > most // 4:
        _check_count(int(traversal.reach(np.arange(num_nodes), *arrays, hop).sum()), most, hop, top)


def _check_count(count: int, most: int, hops: int, top: int, about: str = "") -> None:
    if count > most:
        raise ValueError(
            f"expected at most {most:,} pairs of nodes, got {about}{count:,} or more with --hops {hops} and --top {top}"
            f", {in_words(count * _LIST_BYTES)}; take fewer of both, or raise --max-pairs"
        )
