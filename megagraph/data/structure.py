"""The structural bias as data: powers of the normalised adjacency (channels) or hop distances (buckets).

A batch is B sequences of n regular nodes, then s super nodes, then G global tokens, N = n + s + G. Id -1 is
padding. A~ = D^-1/2 (A + I) D^-1/2 with the degrees of the whole graph; C is the number of its powers. All these
matrices are symmetric, so the rows that a rank holds (S of N, see ``NodeLayout``) are built without the others.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import torch

from megagraph.attention.bias import aligned_columns
from megagraph.attention.fields import MASKED_BUCKET
from megagraph.attention.layout import NodeLayout
from megagraph.data.coarsen import Coarsening, normalized_adjacency
from megagraph.data.graph import Graph, csr_arrays
from megagraph.data.options import BatchOptions, Scope, num_buckets
from megagraph.flags import in_words
from megagraph.threads import in_threads

MAX_HOP_TABLE_NODES = 2**15  # 1 GiB of uint8
MAX_CHANNEL_BYTES = 2**32  # of one rank's share of a batch
_PAIRS_PER_THREAD = 2**14
_ENTRIES_PER_THREAD = 2**16
_PROBES = 64  # nodes


class InducedSubgraph:
    """Cuts the edges among the nodes of each sequence out of an undirected graph.

    Not for several threads at once: they would share a scratch array.

    Args:
        indptr, indices: CSR arrays of the graph, [V + 1] and [E]; neighbours ascend in every row.
    """

    def __init__(self, indptr: np.ndarray, indices: np.ndarray) -> None:
        self._indptr, self._indices = csr_arrays(indptr, indices)
        self._place = np.zeros(len(indptr) - 1, np.int32)

    def __call__(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Nodes [B, n], -1 = padding, the others of a sequence distinct -> CSR arrays of [B * n, n].

        Row (b, i) holds the neighbours of node (b, i) among nodes (b, :): row starts int64, columns int32, and which
        edge of the graph each one is, int64.
        """
        from megagraph.data import traversal

        return traversal.induce(np.ascontiguousarray(nodes, np.int64), self._indptr, self._indices, self._place)


class AdjacencyPowers:
    """A~^1 .. A~^C for the pairs of a sequence.

    Scope "graph" takes them from powers of the whole graph's A~ (ANS-GT). Half of them are kept: A~ is symmetric, so
    A~^(a + b)[i, j] = <A~^a e_i, A~^b e_j>, exact, and A~^3 has a fraction of the entries of A~^6. "batch" takes the
    powers of the part of A~ among the sequence's own nodes: walks that leave the sequence do not count, and A~ is never
    formed. "auto" is "graph" as long as what is kept fits into ``most_bytes``.

    Args:
        adjacency: the graph, or A~ itself: symmetric, with a full diagonal, rows ascending.
        most_bytes: of a kept entry 4, and 4 for every power.

    Raises:
        ValueError: no such power or scope, or scope "graph" would take more than ``most_bytes``.
    """

    def __init__(
        self,
        adjacency: Graph | sp.csr_array,
        num_powers: int,
        scope: Scope = "auto",
        most_bytes: float = BatchOptions.power_gib * 2**30,
    ) -> None:
        if num_powers < 1:
            raise ValueError(f"expected at least one power of the adjacency, got {num_powers}")
        if scope not in ("auto", "graph", "batch"):
            raise ValueError(f"expected scope 'auto', 'graph' or 'batch', got {scope!r}")
        self.num_powers = num_powers
        kept = -(-num_powers // 2)
        self.bytes, counts = 0.0, None
        if scope != "batch":
            self.bytes, counts = _kept_bytes(adjacency, kept, most_bytes)
        if scope == "graph" and self.bytes > most_bytes:
            raise ValueError(
                f"expected powers of the adjacency that fit into {most_bytes / 2**30:g} GiB, got 1 to {kept}, "
                f"which take {in_words(self.bytes)} for {num_powers} channels; raise --power-gib, take "
                "--power-scope batch, or fewer --channels"
            )
        if scope == "auto":
            scope = "graph" if self.bytes <= most_bytes else "batch"
        self.scope = scope
        if scope == "graph":
            matrix = normalized_adjacency(adjacency.adjacency) if isinstance(adjacency, Graph) else adjacency
            assert counts is not None
            self._table = _power_table(matrix, kept, counts)
            return
        self._induced = InducedSubgraph(adjacency.indptr, adjacency.indices)
        self._values = self._scale = None
        if isinstance(adjacency, Graph):
            self._scale = (np.diff(adjacency.indptr) + 1).astype(np.float32) ** -0.5
        else:
            self._values = adjacency.data

    def __call__(self, nodes: np.ndarray, rows: range) -> np.ndarray:
        """Powers between the slots ``rows`` of nodes [B, m] and all m -> float32 [B, C, len(rows), m].

        A node may occur twice in a sequence (two nodes of one super node), and then counts once.
        """
        num_sequences, m = nodes.shape
        if self.scope == "graph":
            from megagraph.data.power_loops import pair_powers

            nodes = np.ascontiguousarray(nodes, np.int64)
            powers = np.zeros((num_sequences, self.num_powers, len(rows), m), np.float32)
            starts, columns, values = self._table

            def run(_: int, first: int, last: int) -> None:
                scratch = np.zeros(len(starts) - 1, np.float32)
                own = nodes[first:last], rows.start, rows.stop
                pair_powers(starts, columns, values, *own, scratch, powers[first:last])

            in_threads(run, np.full(num_sequences, len(rows) * m), _PAIRS_PER_THREAD)
            return powers
        powers = np.empty((num_sequences, self.num_powers, len(rows), m), np.float32)
        first = _first_occurrence(nodes)
        blocks, loops = self._within(np.where(first == np.arange(m), nodes, -1))
        slot = np.arange(num_sequences)[:, None] * m + first
        # the rows asked for stand in columns, so that the sparse factor is the left one
        power = np.zeros((num_sequences * m, len(rows)), np.float32)
        power[slot[:, rows.start : rows.stop], np.arange(len(rows))] = 1
        for channel in range(self.num_powers):
            power = blocks @ power + loops * power
            powers[:, channel] = power[slot].swapaxes(1, 2)
        return powers

    def __str__(self) -> str:
        size = in_words(self.bytes)
        if self.scope == "graph":
            return f"bias from powers 1 to {self.num_powers} of the graph's adjacency, {size}"
        why = f": the graph's would take {size}, see --power-gib" if self.bytes else ""
        return f"bias from powers 1 to {self.num_powers} of the adjacency within each sequence{why}"

    def _within(self, nodes: np.ndarray) -> tuple[sp.csr_array, np.ndarray]:
        """A~ among the nodes [B, m] of each sequence: [B * m, B * m], and what else is on its diagonal, [B * m, 1]."""
        starts, columns, entries = self._induced(nodes)
        row = np.repeat(np.arange(nodes.size), np.diff(starts))
        columns = row - row % nodes.shape[1] + columns
        if self._scale is None:
            assert self._values is not None
            values, loops = self._values[entries], np.zeros(1, np.float32)
        else:
            scale = np.where(nodes < 0, np.float32(0), self._scale[nodes]).ravel()
            values, loops = scale[row] * scale[columns], scale**2
        return sp.csr_array((values, columns, starts), shape=(nodes.size, nodes.size)), loops[:, None]


def _power_table(
    matrix: sp.csr_array, num_powers: int, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row starts [V + 1, h], columns and values [h, entries] of powers 1..h, as ``power_loops.powers`` has them, from
    the ``counts`` [V] of each row's entries."""
    from megagraph.data.power_loops import powers

    arrays = csr_arrays(matrix.indptr, matrix.indices)
    starts = np.zeros((len(counts) + 1, num_powers), np.int64)
    starts[1:, 0] = counts.cumsum()
    columns = np.empty(starts[-1, 0], np.int32)
    values = np.empty((num_powers, len(columns)), np.float32)

    def run(_: int, first: int, last: int) -> None:
        powers(*arrays, matrix.data, first, last, starts, columns, values)

    in_threads(run, counts, _ENTRIES_PER_THREAD)
    return starts, columns, values


def _kept_bytes(adjacency: Graph | sp.csr_array, num_powers: int, most_bytes: float) -> tuple[float, np.ndarray | None]:
    """Bytes of powers 1..h in the pattern of A~^h, and the entries of its rows [V]; no entries where less than all of
    them tells that the bytes are above ``most_bytes``."""
    from megagraph.data import traversal

    of_entry = 4 * (1 + num_powers)
    num_nodes = len(adjacency.indptr) - 1
    if (least := of_entry * len(adjacency.indices)) > most_bytes:
        return float(least), None
    arrays = csr_arrays(adjacency.indptr, adjacency.indices)
    estimate = of_entry * reach_of_some(arrays, num_powers)
    if estimate > 4 * most_bytes:
        return estimate, None
    counts = traversal.reach(np.arange(num_nodes), *arrays, num_powers)
    return of_entry * float(counts.sum()), counts


def reach_of_some(arrays: tuple[np.ndarray, np.ndarray], num_hops: int) -> float:
    """About how many pairs of nodes are within ``num_hops`` in a graph, a node and itself among them, by what some
    nodes reach; ``arrays``: of ``csr_arrays``."""
    from megagraph.data import traversal

    num_nodes = len(arrays[0]) - 1
    some = np.random.default_rng(0).choice(num_nodes, min(_PROBES, num_nodes), replace=False)
    return num_nodes * float(traversal.reach(some, *arrays, num_hops).mean())


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


def hop_distances(starts: np.ndarray, columns: np.ndarray, max_distance: int, sources: range, out: np.ndarray) -> None:
    """Hops from the nodes ``sources`` of B graphs to all n nodes of theirs, into uint8 [B, len(sources), n].

    Args:
        starts, columns: CSR arrays [B * n, n], int64 and int32, as ``InducedSubgraph`` gives them.
        max_distance: at most 253; max_distance + 1 means further or unreachable.
        sources: which of the n nodes to begin at.
        out: what to fill.

    Examples:
        >>> path = np.array([0, 1, 3, 5, 6]), np.array([1, 0, 2, 1, 3, 2], np.int32)  # 0 - 1 - 2 - 3
        >>> starts, columns, _ = InducedSubgraph(*path)(np.array([[0, 1, 2, -1], [2, 3, 0, -1]]))
        >>> hops = np.empty((2, 4, 4), np.uint8)
        >>> hop_distances(starts, columns, 2, range(4), hops)
        >>> hops[1, 0]  # from node 2 to 3, to 0, which is unreachable among these, and to padding
        array([0, 1, 3, 3], dtype=uint8)
    """
    from megagraph.data import traversal

    out[...] = max_distance + 1
    traversal.hops(starts, columns, sources.start, max_distance, out)


def _aligned(shape: tuple[int, ...], fill: float, dtype: type) -> np.ndarray:
    """A filled array whose rows have ``aligned_columns`` in memory."""
    return np.full((*shape[:-1], aligned_columns(shape[-1])), fill, dtype)[..., : shape[-1]]


def _tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What ``_aligned`` gave, with the memory between the rows up to the end of the last one; maybe rounded."""
    return torch.from_numpy(array.base).to(dtype)[..., : array.shape[-1]]


class BiasChannels:
    """Channels of ``ProjectedBias``: C powers of A~, one indicator per global token, and one of the own super node.

    Between regular nodes the powers of the graph; between a super node and a regular node, or two super nodes,
    those of the coarse graph between their super nodes. Channel C + g is 1 on row and column of global token g. With
    ``own_super`` the last channel is 1 between a regular node and the super node that it belongs to.

    Args:
        dtype: of the channels, which are computed in fp32: bf16 halves what is sent to the device.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        *,
        num_powers: int,
        global_tokens: int,
        scope: Scope = "auto",
        most_bytes: float = BatchOptions.power_gib * 2**30,
        own_super: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.global_tokens = global_tokens
        self.own_super = own_super
        self.size = num_powers + global_tokens + own_super  # channels
        self.powers = AdjacencyPowers(graph, num_powers, scope, most_bytes)
        self.coarse_powers = AdjacencyPowers(coarsening.adjacency, num_powers, scope, most_bytes)
        self._super_of = np.append(coarsening.membership, -1)  # padding (-1) stays padding

    @property
    def start(self) -> tuple[float, ...]:
        """Initial weights of the channels: all powers weigh as much as one together."""
        powers = self.powers.num_powers
        return (*[1.0 / powers] * powers, *[0.0] * (self.size - powers))

    def num_bytes(self, num_sequences: int, layout: NodeLayout) -> int:
        """Bytes of a rank's channels of so many sequences.

        Raises:
            ValueError: more than MAX_CHANNEL_BYTES.
        """
        entries = num_sequences * layout.num_local * aligned_columns(layout.num_columns)
        if (channel_bytes := self.dtype.itemsize * self.size * entries) > MAX_CHANNEL_BYTES:
            raise ValueError(
                f"the {self.size} channels of {num_sequences} x {layout.num_local} x {layout.num_columns} node pairs "
                f"take {channel_bytes:,} bytes, above the limit of {MAX_CHANNEL_BYTES:,}; take bias 'bucket' "
                f"({entries:,} bytes), fewer sequences, shorter ones, or more ranks to share a sequence"
            )
        return channel_bytes

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> torch.Tensor:
        """Regular nodes [B, n], super nodes [B, s] -> [B, channels, S, N] of ``dtype``; zero on padding."""
        self.num_bytes(len(regular), layout)
        n, s, block = layout.num_nodes, supers.shape[1], layout.block()
        num_powers, tokens = self.powers.num_powers, n + s
        channels = _aligned((len(regular), self.size, layout.num_local, layout.num_columns), 0, np.float32)
        regular_rows, super_rows = channels[:, :, : len(block)], channels[:, :, layout.block_size :]
        regular_rows[:, :num_powers, :, :n] = self.powers(regular, block)
        super_of = self._super_of[regular]
        coarse = self.coarse_powers(np.concatenate([super_of, supers], axis=1), range(n, tokens))
        super_rows[:, :num_powers, :s, :tokens] = coarse
        regular_rows[:, :num_powers, :, n:tokens] = coarse[..., block.start : block.stop].swapaxes(2, 3)
        valid = np.ones((len(regular), layout.num_columns), np.float32)
        valid[:, :n] = regular >= 0
        valid[:, n:tokens] = supers >= 0
        for token in range(self.global_tokens):
            super_rows[:, num_powers + token, s + token] = valid
            super_rows[:, num_powers + token, :, tokens + token] = valid[:, n:]
            regular_rows[:, num_powers + token, :, tokens + token] = valid[:, block.start : block.stop]
        if self.own_super:
            own = (supers[:, :, None] == super_of[:, None, :]) & (supers >= 0)[:, :, None]
            super_rows[:, -1, :s, :n] = own
            regular_rows[:, -1, :, n:tokens] = own[..., block.start : block.stop].swapaxes(1, 2)
        return _tensor(channels, self.dtype)


class CoarseBuckets:
    """Buckets between super nodes and all nodes of a sequence, M = max_distance + 2 distances and one more:

    0 .. M - 1      hops in the coarse graph between their super nodes, but
    M               a regular node and the super node that it belongs to
    """

    def __init__(self, coarsening: Coarsening, max_distance: int) -> None:
        num_parts = coarsening.num_parts
        if num_parts > MAX_HOP_TABLE_NODES:
            raise ValueError(
                f"expected at most {MAX_HOP_TABLE_NODES} super nodes for distance buckets, got "
                f"{num_parts}; lower super_ratio or take bias='projected'"
            )
        self._own = np.uint8(max_distance + 2)
        self._super_of = coarsening.membership
        self._hops = np.empty((num_parts, num_parts), np.uint8)
        arrays = csr_arrays(coarsening.adjacency.indptr, coarsening.adjacency.indices)
        hop_distances(*arrays, max_distance, range(num_parts), self._hops[None])

    def __call__(self, regular: np.ndarray, supers: np.ndarray) -> np.ndarray:
        """Regular nodes [B, n], super nodes [B, s] -> uint8 [B, s, n + s]; of padding, any."""
        super_of = self._super_of[regular]
        hops = self._hops[supers[:, :, None], np.concatenate([super_of, supers], axis=1)[:, None, :]]
        hops[:, :, : regular.shape[1]][supers[:, :, None] == super_of[:, None, :]] = self._own
        return hops


class DistanceBuckets:
    """Buckets of ``BucketBias``: clipped hop distances (Graphormer's spatial encoding).

    With M = max_distance + 2 distances (0 .. max_distance, then further or unreachable):
        0 .. M - 1      two regular nodes: hops in the subgraph among the sequence's regular nodes
        M .. 2 M - 1    a super node and another node: hops in the coarse graph between their super nodes, but
        2 M             a regular node and the super node that it belongs to
        2 M + 1         a global token and any node
        255             padding, row or column
    """

    def __init__(self, graph: Graph, coarsening: Coarsening, *, max_distance: int, global_tokens: int) -> None:
        self.size = num_buckets(max_distance)  # buckets
        self.max_distance = max_distance
        self.global_tokens = global_tokens
        self._induced = InducedSubgraph(graph.indptr, graph.indices)
        self._coarse = CoarseBuckets(coarsening, max_distance)

    @property
    def start(self) -> tuple[float, ...]:
        """Initial value of every bucket: minus its distance."""
        distances = [-float(d) for d in range(self.max_distance + 2)]
        return (*distances, *distances, 0.0, 0.0)

    def num_bytes(self, num_sequences: int, layout: NodeLayout) -> int:
        """Bytes of a rank's buckets of so many sequences."""
        return num_sequences * layout.num_local * aligned_columns(layout.num_columns)

    def build(self, regular: np.ndarray, supers: np.ndarray, layout: NodeLayout) -> torch.Tensor:
        """Regular nodes [B, n], super nodes [B, s] -> uint8 [B, S, N]."""
        n, s, block = layout.num_nodes, supers.shape[1], layout.block()
        tokens = n + s
        buckets = _aligned((len(regular), layout.num_local, layout.num_columns), self.size - 1, np.uint8)
        regular_rows, super_rows = buckets[:, : len(block)], buckets[:, layout.block_size :]
        starts, columns, _ = self._induced(regular)
        hop_distances(starts, columns, self.max_distance, block, regular_rows[:, :, :n])
        hops = self._coarse(regular, supers) + np.uint8(self.max_distance + 2)
        super_rows[:, :s, :tokens] = hops
        regular_rows[:, :, n:tokens] = hops[..., block.start : block.stop].swapaxes(1, 2)
        padding = np.zeros((len(regular), layout.num_columns), bool)
        padding[:, :n] = regular < 0
        padding[:, n:tokens] = supers < 0
        hidden = np.ones((len(regular), layout.num_local), bool)
        hidden[:, : len(block)] = padding[:, block.start : block.stop]
        hidden[:, layout.block_size :] = padding[:, n:]
        sequence, slot = np.nonzero(hidden)
        buckets[sequence, slot] = MASKED_BUCKET
        sequence, slot = np.nonzero(padding)
        buckets[sequence, :, slot] = MASKED_BUCKET
        return _tensor(buckets)
