"""The structural bias as data: powers of the normalised adjacency (channels) or hop distances (buckets).

A batch is B sequences of n regular nodes, then s super nodes, then G global tokens, N = n + s + G. Node id -1 is
padding. A~ = D^-1/2 (A + I) D^-1/2 with the degrees of the whole graph; C is the number of its powers. All these
matrices are symmetric, so the rows that a rank holds (S of N, see ``NodeLayout``) are built without the others.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import scipy.sparse as sp
import torch

from megagraph.attention.layout import NodeLayout
from megagraph.data.coarsen import Coarsening, normalized_adjacency
from megagraph.data.datasets import Graph

Scope = Literal["auto", "graph", "batch"]

PADDING = 255  # the bucket that masks a pair
MAX_POWER_ENTRIES = 2**24  # of A~^C under scope "auto": 16 Mi entries take 512 MiB with 6 powers
MAX_HOP_TABLE_NODES = 2**15  # 1 GiB of uint8
_PAIRWISE_NODES = 256  # sequences up to this long: looking every pair up beats slicing the adjacency
_FRONTIER_BYTES = 2**20  # the neighbours' bits of one block of sources should stay in cache


class PairTable:
    """Symmetric matrices that share one sparse pattern, made for looking up many pairs at once.

    Args:
        matrices: C csr matrices [V, V] with sorted rows; the pattern of the last contains the others'.
    """

    def __init__(self, *matrices: sp.csr_array) -> None:
        self.num_nodes = matrices[0].shape[0]
        rows = (np.repeat(np.arange(self.num_nodes), np.diff(matrix.indptr)) for matrix in matrices)
        keys = [self._key(row, matrix.indices) for row, matrix in zip(rows, matrices, strict=True)]
        self._keys = np.append(keys[-1], np.iinfo(np.int64).max)
        self._values = np.zeros((len(self._keys), len(matrices)), np.float32)  # the last row stands for absent
        for channel, (key, matrix) in enumerate(zip(keys, matrices, strict=True)):
            self._values[np.searchsorted(self._keys, key), channel] = matrix.data

    def _key(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        return rows * np.int64(self.num_nodes) + cols

    def lookup(self, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
        """Entries at ``rows`` and ``cols``, broadcast together -> float32 [..., C]; 0 where absent or padding."""
        key = self._key(rows, cols)
        position = np.searchsorted(self._keys, key)
        position[(self._keys[position] != key) | (cols < 0)] = len(self._keys) - 1
        return self._values[position]

    def within(self, nodes: np.ndarray) -> np.ndarray:
        """Entries among the nodes [B, n] of each sequence -> float32 [B, n, n, C]; only half is looked up."""
        num_sequences, n = nodes.shape
        row, col = np.triu_indices(n)
        pairs = self.lookup(nodes[:, row], nodes[:, col])
        square = np.empty((num_sequences, n, n, pairs.shape[-1]), np.float32)
        square[:, row, col] = pairs
        square[:, col, row] = pairs
        return square


class InducedSubgraph:
    """Cuts what lies among the nodes of each sequence out of one symmetric sparse matrix [V, V]."""

    def __init__(self, matrix: sp.csr_array) -> None:
        self._table = PairTable(matrix)
        # a last, empty row and column that padding (-1) selects
        shape = (matrix.shape[0] + 1,) * 2
        self._padded = sp.csr_array((matrix.data, matrix.indices, np.append(matrix.indptr, matrix.nnz)), shape=shape)

    def __call__(self, nodes: np.ndarray) -> sp.csr_array:
        """Nodes [B, n] -> csr [B * n, n]: row (b, i) holds the entries of node (b, i) with nodes (b, :)."""
        num_sequences, n = nodes.shape
        if n <= _PAIRWISE_NODES:
            return sp.csr_array(self._table.within(nodes).reshape(num_sequences * n, n))
        return sp.csr_array(sp.vstack([self._padded[sequence][:, sequence] for sequence in nodes], format="csr"))


def adjacency_powers(normalized: sp.csr_array, num_powers: int) -> list[sp.csr_array]:
    """A~^1 .. A~^C. The self loops of A~ make every pattern contain those before it."""
    powers = [normalized]
    for _ in range(num_powers - 1):
        powers.append(sp.csr_array(powers[-1] @ normalized))
        powers[-1].sort_indices()
    return powers


def estimate_power_entries(normalized: sp.csr_array, num_powers: int, num_probes: int = 64) -> float:
    """Entries of A~^C, from the reach of some rows; it stops at the first power above MAX_POWER_ENTRIES."""
    num_nodes = normalized.shape[0]
    probes = np.random.default_rng(0).choice(num_nodes, min(num_probes, num_nodes), replace=False)
    reach = normalized[probes]
    for _ in range(num_powers - 1):
        if (entries := reach.nnz * num_nodes / len(probes)) > MAX_POWER_ENTRIES:
            return entries
        reach = reach @ normalized
    return reach.nnz * num_nodes / len(probes)


class AdjacencyPowers:
    """A~^1 .. A~^C for the pairs of a sequence.

    Scope "graph" looks them up in powers of the whole graph's A~ (ANS-GT), "batch" takes the powers of the part
    of A~ among the sequence's own nodes: walks that leave the sequence do not count, and the table is just A~.
    "auto" is "graph" as long as A~^C has at most MAX_POWER_ENTRIES entries.
    """

    def __init__(self, normalized: sp.csr_array, num_powers: int, scope: Scope = "auto") -> None:
        if num_powers < 1:
            raise ValueError(f"expected at least one power of the adjacency, got {num_powers}")
        if scope not in ("auto", "graph", "batch"):
            raise ValueError(f"expected scope 'auto', 'graph' or 'batch', got {scope!r}")
        if scope == "auto":
            scope = "graph" if estimate_power_entries(normalized, num_powers) <= MAX_POWER_ENTRIES else "batch"
        self.scope = scope
        self.num_powers = num_powers
        if scope == "graph":
            self._table = PairTable(*adjacency_powers(normalized, num_powers))
        else:
            self._induced = InducedSubgraph(normalized)

    def __call__(self, nodes: np.ndarray, rows: range) -> np.ndarray:
        """Powers between the slots ``rows`` of nodes [B, m] and all m -> float32 [B, C, len(rows), m].

        A node may occur twice in a sequence (two nodes of one super node), and then counts once.
        """
        num_sequences, m = nodes.shape
        if self.scope == "graph":
            if len(rows) == m:
                pairs = self._table.within(nodes)
            else:
                pairs = self._table.lookup(nodes[:, rows.start : rows.stop, None], nodes[:, None, :])
            return pairs.transpose(0, 3, 1, 2)
        first = _first_occurrence(nodes)
        base = self._induced(np.where(first == np.arange(m), nodes, -1))
        blocks = sp.csr_array((base.data, _neighbor_rows(base), base.indptr), shape=(num_sequences * m,) * 2)
        slot = np.arange(num_sequences)[:, None] * m + first
        # the rows asked for stand in columns, so that the sparse factor is the left one
        power = np.zeros((num_sequences * m, len(rows)), np.float32)
        power[slot[:, rows.start : rows.stop], np.arange(len(rows))] = 1
        powers = np.empty((num_sequences, self.num_powers, len(rows), m), np.float32)
        for channel in range(self.num_powers):
            power = blocks @ power
            powers[:, channel] = power[slot].swapaxes(1, 2)
        return powers


def _first_occurrence(nodes: np.ndarray) -> np.ndarray:
    """Nodes [B, m] -> [B, m]: the position at which each slot's node stands first in its sequence."""
    order = np.argsort(nodes, axis=1, kind="stable")
    ordered = np.take_along_axis(nodes, order, axis=1)
    leads = np.ones(nodes.shape, bool)
    leads[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    lead = np.maximum.accumulate(np.where(leads, np.arange(nodes.shape[1]), 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, lead, axis=1), axis=1)
    return first


def _neighbor_rows(adjacency: sp.csr_array) -> np.ndarray:
    """Entries of B graphs [B * n, n], as InducedSubgraph gives them -> the row of every entry's column."""
    num_rows, n = adjacency.shape
    row = np.repeat(np.arange(num_rows), np.diff(adjacency.indptr))
    return row - row % n + adjacency.indices


def hop_distances(adjacency: sp.csr_array, max_distance: int, sources: range) -> np.ndarray:
    """Hops from the nodes ``sources`` of B graphs to all n nodes of theirs -> uint8 [B, len(sources), n].

    max_distance + 1 means further or unreachable. A breadth-first search from all sources at once, 64 to a machine
    word: a hop is one OR over the neighbours, and the distance is the number of hops after which a node is still
    unreached.

    Args:
        adjacency: [B * n, n] as InducedSubgraph gives it, with self loops; an empty row is a node on its own.
    """
    num_rows, n = adjacency.shape
    distances = np.empty((num_rows // n, len(sources), n), np.uint8)
    neighbor = _neighbor_rows(adjacency)
    linked = np.flatnonzero(np.diff(adjacency.indptr))
    starts = adjacency.indptr[linked]
    words = max(1, _FRONTIER_BYTES // (8 * max(1, adjacency.nnz)))
    for start in range(0, len(sources), 64 * words):
        chunk = sources[start : start + 64 * words]
        reached = np.zeros((n, -(-len(chunk) // 64) * 64), bool)
        reached[chunk, np.arange(len(chunk))] = True
        bits = np.packbits(reached, axis=1, bitorder="little").view(np.uint64)
        bits = np.tile(bits, (num_rows // n, 1))
        distance = np.full((num_rows, len(chunk)), max_distance + 1, np.uint8)
        for hop in range(max_distance + 1):
            if hop and len(linked):
                bits[linked] = np.bitwise_or.reduceat(bits[neighbor], starts, axis=0)
            distance -= np.unpackbits(bits.view(np.uint8), axis=1, count=len(chunk), bitorder="little")
        distances[:, start : start + len(chunk)] = distance.reshape(-1, n, len(chunk)).swapaxes(1, 2)
    return distances


class BiasChannels:
    """Channels of ``ProjectedBias``: C powers of A~ and one indicator per global token.

    Between regular nodes the powers of the graph; between a super node and a regular node, or two super nodes,
    those of the coarse graph between their super nodes. Channel C + g is 1 on row and column of global token g.
    """

    def __init__(
        self, graph: Graph, coarsening: Coarsening, *, num_powers: int, global_tokens: int, scope: Scope = "auto"
    ) -> None:
        self.global_tokens = global_tokens
        self.size = num_powers + global_tokens  # channels
        self.powers = AdjacencyPowers(normalized_adjacency(graph.adjacency), num_powers, scope)
        self.coarse_powers = AdjacencyPowers(coarsening.adjacency, num_powers, scope)
        self._super_of = np.append(coarsening.membership, -1)  # padding (-1) stays padding

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> torch.Tensor:
        """Regular nodes [B, n], super nodes [B, s] -> float32 [B, C + G, S, N]; zero on padding."""
        n, s, block = layout.num_nodes, supers.shape[1], layout.block()
        num_powers, tokens = self.powers.num_powers, n + s
        channels = np.zeros((len(regular), self.size, layout.num_local, layout.num_columns), np.float32)
        regular_rows, super_rows = channels[:, :, : len(block)], channels[:, :, layout.block_size :]
        regular_rows[:, :num_powers, :, :n] = self.powers(regular, block)
        coarse = self.coarse_powers(np.concatenate([self._super_of[regular], supers], axis=1), range(n, tokens))
        super_rows[:, :num_powers, :s, :tokens] = coarse
        regular_rows[:, :num_powers, :, n:tokens] = coarse[..., block.start : block.stop].swapaxes(2, 3)
        valid = np.ones((len(regular), layout.num_columns), np.float32)
        valid[:, :n] = regular >= 0
        for token in range(self.global_tokens):
            super_rows[:, num_powers + token, s + token] = valid
            super_rows[:, num_powers + token, :, tokens + token] = 1
            regular_rows[:, num_powers + token, :, tokens + token] = valid[:, block.start : block.stop]
        return torch.from_numpy(channels)


def num_buckets(max_distance: int) -> int:
    """Hops 0..max_distance and "further" for regular pairs, the same again for super nodes, global tokens."""
    return 2 * (max_distance + 2) + 1


class DistanceBuckets:
    """Buckets of ``BucketBias``: clipped hop distances (Graphormer's spatial encoding).

    With M = max_distance + 2 distances (0 .. max_distance, then further or unreachable):
        0 .. M - 1      two regular nodes: hops in the subgraph among the sequence's regular nodes
        M .. 2 M - 1    a super node and another node: hops in the coarse graph between their super nodes
        2 M             a global token and any node
        255             padding, row or column
    """

    def __init__(self, graph: Graph, coarsening: Coarsening, *, max_distance: int, global_tokens: int) -> None:
        self.size = num_buckets(max_distance)  # buckets
        if max_distance < 1 or self.size > PADDING:
            raise ValueError(f"expected max_distance in 1..{(PADDING - 1) // 2 - 2}, got {max_distance}")
        if coarsening.num_parts > MAX_HOP_TABLE_NODES:
            raise ValueError(
                f"expected at most {MAX_HOP_TABLE_NODES} super nodes for distance buckets, got "
                f"{coarsening.num_parts}; lower super_ratio or take bias='projected'"
            )
        self.max_distance = max_distance
        self.global_tokens = global_tokens
        self._induced = InducedSubgraph(normalized_adjacency(graph.adjacency))
        self._super_of = coarsening.membership
        self._coarse_hops = hop_distances(coarsening.adjacency, max_distance, range(coarsening.num_parts))[0]

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> torch.Tensor:
        """Regular nodes [B, n], super nodes [B, s] -> uint8 [B, S, N]."""
        n, s, block = layout.num_nodes, supers.shape[1], layout.block()
        tokens = n + s
        buckets = np.full((len(regular), layout.num_local, layout.num_columns), self.size - 1, np.uint8)
        regular_rows, super_rows = buckets[:, : len(block)], buckets[:, layout.block_size :]
        regular_rows[:, :, :n] = hop_distances(self._induced(regular), self.max_distance, block)
        coarse = np.concatenate([self._super_of[regular], supers], axis=1)
        hops = self._coarse_hops[supers[:, :, None], coarse[:, None, :]] + np.uint8(self.max_distance + 2)
        super_rows[:, :s, :tokens] = hops
        regular_rows[:, :, n:tokens] = hops[..., block.start : block.stop].swapaxes(1, 2)
        buckets[:, len(block) : layout.block_size] = PADDING
        padding = regular < 0
        sequence, slot = np.nonzero(padding[:, block.start : block.stop])
        regular_rows[sequence, slot] = PADDING
        sequence, slot = np.nonzero(padding)
        buckets[sequence, :, slot] = PADDING
        return torch.from_numpy(buckets)
