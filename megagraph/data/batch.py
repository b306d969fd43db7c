"""Batches of node sequences: what the model reads, and the two ways to build it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from megagraph.attention.layout import NodeLayout
from megagraph.data.coarsen import Coarsening, coarsen, merge, nearest_parts, partition, quality, quotient
from megagraph.data.graph import Graph
from megagraph.data.sample import Pagerank, sample_neighbors
from megagraph.data.structure import BiasChannels, DistanceBuckets, Scope

SEQUENCE_ALIGNMENT = 128
EMBEDDED = ("features", "degrees", "node_ids", "node_index")  # fields of a batch that only the embedding reads
READ_OUT = ("labels", "target_nodes")  # and those that only the loss and the predictions read
_CLUSTER_NODES = 300  # and fewer in short sequences: some eight make one
_COARSE_EDGES = 32  # of a super node of cluster batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of every global batch that one rank builds; the default is all of it.

    The sequences are dealt out over ``dp`` ranks, and the query rows of each over ``cp`` ranks (``NodeLayout``). A
    rank goes through its sequences in ``num_microbatches`` equal runs. One that does not embed, of a later stage of a
    pipeline, builds no features, most of a batch: its ``EMBEDDED`` fields have no rows.
    """

    dp_rank: int = 0
    dp: int = 1
    cp_rank: int = 0
    cp: int = 1
    num_microbatches: int = 1
    embeds: bool = True

    def __post_init__(self) -> None:
        for name, rank, size in (("dp", self.dp_rank, self.dp), ("cp", self.cp_rank, self.cp)):
            if not 0 <= rank < size:
                raise ValueError(f"expected {name}_rank in 0..{name} - 1 = {size - 1}, got {rank}")
        if self.num_microbatches < 1:
            raise ValueError(f"expected num_microbatches >= 1, got {self.num_microbatches}")


WHOLE = Share()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One rank's share of B sequences of N slots: N' regular nodes, then N_s super nodes, the last G global tokens.

    Empty sequences, with padding for all regular nodes, fill B up to a multiple of dp * K. The rank has b = B / dp
    of them, and the S query rows of ``layout`` of each. Of the first T regular slots, which are read out, t are
    among its rows. Each of its K micro-batches has its own table of U distinct rows of features, a shorter one
    ending in zeros; ``torch.chunk(tensor, K)`` of every tensor gives the micro-batches. Shapes:
        features:         [K * U, d_in]     float32  raw features of the nodes and super nodes in local slots
        degrees:          [K * U]           int64    of these rows; a super node has the mean degree of its members
        node_ids:         [K * U]           int64    of these rows: 0..V-1, super nodes from V on; -1 = not read
        node_index:       [b, S - G]        int64    row of the table, global tokens have none; 0 on padding
        structure:        [b, C + G, S, N]  float32  or bfloat16, channels of ``ProjectedBias``, or
                          [b, S, N]         uint8    buckets of ``BucketBias``
        key_padding_mask: [b, N]            bool     True = padding
        labels:           [b, t]            int64    class, -1 = does not count
        target_nodes:     [b, t]            int64    node id, -1 = padding
        sequence_ids:     [b]               int64    position in the global batch

    ``num_targets`` is the number of labels that count in the global batch, on all ranks together.
    """

    features: Tensor
    degrees: Tensor
    node_ids: Tensor
    node_index: Tensor
    structure: Tensor
    key_padding_mask: Tensor
    labels: Tensor
    target_nodes: Tensor
    sequence_ids: Tensor
    layout: NodeLayout
    num_targets: int

    @property
    def batch_size(self) -> int:
        return self.key_padding_mask.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, all slots of a sequence."""
        return self.key_padding_mask.shape[1]

    def model_inputs(self, dropout_key: Tensor | None = None) -> dict[str, Any]:
        """The keyword arguments of a model's forward pass; ``dropout_key`` int32 [b] in training."""
        return {
            "features": self.features,
            "degrees": self.degrees,
            "node_index": self.node_index,
            "structure": self.structure,
            "key_padding_mask": self.key_padding_mask,
            "layout": self.layout,
            "num_targets": self.labels.shape[1],
            "dropout_key": dropout_key,
        }

    def to(
        self,
        device: torch.device | str,
        *,
        leave: Collection[str] = (),
        non_blocking: bool = False,
    ) -> Batch:
        """The batch on ``device``, but for the fields to ``leave``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking), leave)

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor], leave: Collection[str] = ()) -> Batch:
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name not in leave)
        mapped: dict[str, Any] = {name: function(value) for name, value in values if isinstance(value, Tensor)}
        # with the memory between its rows: they stay aligned, and it is one copy
        mapped["structure"] = function(_whole_rows(self.structure))[..., : self.structure.shape[-1]]
        return replace(self, **mapped)


def _whole_rows(structure: Tensor) -> Tensor:
    """Rows as long as they are apart in memory."""
    return structure.as_strided((*structure.shape[:-1], structure.stride(-2)), structure.stride())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _SuperRows:
    """Features float32 [Q, d_in] and degrees int64 [Q] of rows, row q that of part q % P; the row of every
    super node [b, N_s - G], -1 = masked."""

    features: np.ndarray
    degrees: np.ndarray
    rows: np.ndarray


class _Builder:
    """What both kinds of batch share: from node ids to a ``Batch``."""

    num_regular: int  # N'
    sequence_nodes: int  # N
    num_samples = 1  # sequences of a target

    def __init__(self, graph: Graph, coarsening: Coarsening, structure: BiasChannels | DistanceBuckets) -> None:
        self.graph = graph
        self.coarsening = coarsening
        self.structure = structure
        members = np.bincount(coarsening.membership)
        degrees = np.bincount(coarsening.membership, weights=np.diff(graph.indptr)) / members
        self._super_degrees = _rounded(degrees)

    def _super_nodes(self, regular: np.ndarray, supers: np.ndarray) -> _SuperRows:
        """Features and degrees of the super nodes [b, N_s - G] beside the regular nodes [b, N']."""
        return _SuperRows(features=self.coarsening.features, degrees=self._super_degrees, rows=supers)

    def num_bytes(self, batch_size: int, share: Share) -> int:
        """The most that a rank's share of a batch of so many targets (ego) or sequences (cluster) takes.

        Raises:
            ValueError: its channels take more than ``structure.MAX_CHANNEL_BYTES``.
        """
        num_super = self.sequence_nodes - self.num_regular
        layout = NodeLayout(self.num_regular, num_super, share.cp_rank, share.cp)
        num_runs = share.dp * share.num_microbatches
        num_sequences = -(-batch_size * self.num_samples // num_runs) * share.num_microbatches
        row_bytes = 4 * self.graph.in_features + 5 * 8  # features; degrees, ids, index, labels, targets
        rest = num_sequences * (layout.num_local * row_bytes + layout.num_columns + 8)
        return self.structure.num_bytes(num_sequences, layout) + rest

    @property
    def num_rows(self) -> int:
        """Nodes and super nodes."""
        return self.graph.num_nodes + self.coarsening.num_parts

    def _batch(self, regular: np.ndarray, supers: np.ndarray, labels: np.ndarray, share: Share) -> Batch:
        """The share of regular nodes [B, N'] (-1 = padding), super nodes [B, N_s - G] and labels [B, T]."""
        num_targets = int((labels >= 0).sum())
        num_super = supers.shape[1] + self.structure.global_tokens
        layout = NodeLayout(regular.shape[1], num_super, share.cp_rank, share.cp)
        block = slice(layout.block().start, layout.block().stop)

        num_microbatches = share.num_microbatches
        num_sequences = -(-len(regular) // (share.dp * num_microbatches)) * num_microbatches
        ids = share.dp_rank * num_sequences + np.arange(num_sequences)
        empty = ids >= len(regular)
        sequences = np.where(empty, 0, ids)
        regular, supers, labels = regular[sequences], supers[sequences], labels[sequences]
        regular[empty] = labels[empty] = -1

        padding = np.zeros((num_sequences, layout.num_columns), bool)
        padding[:, : layout.num_nodes] = regular < 0
        super_rows = self._super_nodes(regular, supers)
        supers = np.where(super_rows.rows < 0, -1, supers)
        padding[:, layout.num_nodes : layout.num_nodes + supers.shape[1]] = supers < 0
        if share.embeds:
            tables = self._row_tables(regular[:, block], super_rows, empty, layout, num_microbatches)
        else:
            no_ids = torch.empty(0, dtype=torch.int64)
            tables = (torch.empty(0, self.graph.in_features), no_ids, no_ids, no_ids)
        features, degrees, node_ids, node_index = tables
        return Batch(
            features=features,
            degrees=degrees,
            node_ids=node_ids,
            node_index=node_index,
            structure=self.structure.build(regular, supers, layout),
            key_padding_mask=torch.from_numpy(padding),
            # only T slots have labels: a block beyond them slices nothing
            labels=torch.from_numpy(np.ascontiguousarray(labels[:, block])),
            target_nodes=torch.from_numpy(np.ascontiguousarray(regular[:, : labels.shape[1]][:, block])),
            sequence_ids=torch.from_numpy(ids),
            layout=layout,
            num_targets=num_targets,
        )

    def _row_tables(
        self, block: np.ndarray, supers: _SuperRows, empty: np.ndarray, layout: NodeLayout, num_microbatches: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A rank's regular nodes [b, <= R] and super nodes, empty sequences [b] -> features, degrees, ids, node_index.

        The features are as wide as those of super nodes: a learned embedding has none.
        """
        # one numbering for both: nodes first, then super nodes
        num_nodes = self.graph.num_nodes
        slots = np.full((len(block), layout.block_size + supers.rows.shape[1]), -1)
        slots[:, : block.shape[1]] = block
        slots[:, layout.block_size :] = np.where(supers.rows < 0, -1, supers.rows + num_nodes)
        padding = slots < 0
        tables, indices, used = [], [], []
        for run, ignored in zip(
            *(np.split(x, num_microbatches) for x in (slots, padding | empty[:, None])), strict=True
        ):
            # padding takes a row that is there anyway
            rows, index = np.unique(np.where(run < 0, max(run.max(), 0), run), return_inverse=True)
            tables.append(rows)
            indices.append(index.reshape(run.shape))
            used.append(np.zeros(len(rows), bool))
            used[-1][indices[-1][~ignored]] = True
        node_index = np.concatenate(indices)
        node_index[padding] = 0
        num_rows = max(map(len, tables))
        features = torch.empty(num_microbatches, num_rows, supers.features.shape[1])
        degrees = torch.zeros(num_microbatches, num_rows, dtype=torch.int64)
        node_ids = torch.full((num_microbatches, num_rows), -1)
        for table, row_degrees, ids, rows, real in zip(features, degrees, node_ids, tables, used, strict=True):
            nodes, super_rows = np.split(rows, [np.searchsorted(rows, num_nodes)])
            super_rows -= num_nodes
            self.graph.read_features(nodes, table[: len(nodes)].numpy())
            table[len(nodes) : len(rows)] = torch.from_numpy(supers.features[super_rows])
            table[len(rows) :] = 0
            degrees_of = [self.graph.indptr[nodes + 1] - self.graph.indptr[nodes], supers.degrees[super_rows]]
            row_degrees[: len(rows)] = torch.from_numpy(np.concatenate(degrees_of))
            parts = super_rows % self.coarsening.num_parts
            # what only empty sequences hold is not read: how many there are depends on the layout
            ids[: len(rows)] = torch.from_numpy(np.where(real, np.concatenate([nodes, num_nodes + parts]), -1))
        return features.flatten(0, 1), degrees.flatten(), node_ids.flatten(), torch.from_numpy(node_index)


class EgoBatches(_Builder):
    """ANS-GT's batches: a sequence is one target, k sampled neighbours, super nodes, global tokens.

    The super nodes are the target's own, and of the others those with the largest entries in its row of the coarse
    adjacency; masked where there are fewer. A batch holds ``num_samples`` sequences of every target, those of one
    target in a row. N = 1 + k + num_super.

    Args:
        num_super: N_s, with the global tokens.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        pagerank: Pagerank,
        structure: BiasChannels | DistanceBuckets,
        *,
        k: int = 14,
        num_samples: int = 8,
        num_super: int = 2,
    ) -> None:
        if k < 1 or num_samples < 1:
            raise ValueError(f"expected k and num_samples of at least 1, got {k} and {num_samples}")
        super().__init__(graph, coarsening, structure)
        self.pagerank = pagerank
        self.k = k
        self.num_samples = num_samples
        self.num_regular = 1 + k
        self.sequence_nodes = self.num_regular + num_super
        self._nearest = nearest_parts(coarsening.adjacency, num_super - structure.global_tokens)

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Targets of every batch of an epoch: ``nodes`` in order, or shuffled by ``rng``."""
        order = nodes if rng is None else rng.permutation(nodes)
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def build(
        self, targets: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """One batch for the targets [B]; labels of nodes outside ``label_mask`` [V] do not count.

        Neighbours are drawn for all targets, so that every share is of the same batch.
        """
        sampled = sample_neighbors(self.pagerank(targets), self.num_samples, self.k, rng)
        targets = np.repeat(targets, self.num_samples)[:, None]
        regular = np.concatenate([targets, sampled.reshape(len(targets), self.k)], axis=1)
        supers = self._nearest[self.coarsening.membership[targets[:, 0]]]
        return self._batch(regular, supers, np.where(label_mask[targets], self.graph.labels[targets], -1), share)


class ClusterBatches(_Builder):
    """Long sequences: whole clusters packed together, every super node of the coarsening, global tokens.

    Every node of the graph is a regular node of one sequence per epoch. N' is ``sequence_nodes``, or the size
    of the graph where that is smaller; N = N' + P + G with P super nodes. In every sequence a super node stands for
    its members outside of that sequence: it has the mean of their features and of their degrees, and is masked where
    there are none.

    Args:
        clusters: [V] cluster of every node, from 0 on without gaps, none in two super nodes.
        edges: between the clusters, their ``quotient``.
        together: the probability that the next cluster of a sequence is the one with the most edges to those in it, and
            not any one.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        clusters: np.ndarray,
        edges: sp.csr_array,
        structure: BiasChannels | DistanceBuckets,
        *,
        sequence_nodes: int = 1024,
        together: float = 0.5,
    ) -> None:
        if sequence_nodes < 1 or sequence_nodes % SEQUENCE_ALIGNMENT:
            raise ValueError(f"expected sequence_nodes to be a multiple of {SEQUENCE_ALIGNMENT}, got {sequence_nodes}")
        if not 0 <= together <= 1:
            raise ValueError(f"expected 0 <= together <= 1, got {together}")
        super().__init__(graph, coarsening, structure)
        self.num_regular = min(sequence_nodes, graph.num_nodes)
        self.sequence_nodes = self.num_regular + coarsening.num_parts + structure.global_tokens
        self.together = together
        self.quality = quality(graph, clusters, edges)
        self._members = np.split(np.argsort(clusters, kind="stable"), np.cumsum(np.bincount(clusters))[:-1])
        self._edges = edges
        self._parts = np.arange(coarsening.num_parts)
        size = np.bincount(coarsening.membership)[:, None]
        degrees = np.bincount(coarsening.membership, weights=np.diff(graph.indptr))[:, None]
        self._sums = np.concatenate([coarsening.features * size.astype(np.float64), degrees, size], axis=1)

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Regular nodes [B, N'] of every batch of an epoch; without ``rng`` always the same.

        All nodes of the graph take part, as context, whichever ``nodes`` count.
        """
        rng = np.random.default_rng(0) if rng is None else rng
        sequences: list[np.ndarray] = []
        room = 0
        left = np.ones(len(self._members), bool)
        anyone = iter(rng.permutation(len(left)))
        pull = np.zeros(len(left))  # edges from the clusters of the sequence to those that are left
        for _ in range(len(left)):
            cluster = int(pull.argmax())
            if rng.random() >= self.together or pull[cluster] == 0:
                cluster = next(cluster for cluster in anyone if left[cluster])
            left[cluster] = False
            members = self._members[cluster]
            # a cluster longer than a sequence is cut
            for start in range(0, len(members), self.num_regular):
                piece = members[start : start + self.num_regular]
                if len(piece) > room:
                    sequences.append(np.full(self.num_regular, -1, np.int64))
                    room = self.num_regular
                    pull[:] = 0
                filled = self.num_regular - room
                sequences[-1][filled : filled + len(piece)] = piece
                room -= len(piece)
            edges = slice(self._edges.indptr[cluster], self._edges.indptr[cluster + 1])
            others = self._edges.indices[edges]
            pull[others] += self._edges.data[edges]
            pull[others[~left[others]]] = 0
        return [np.stack(sequences[start : start + batch_size]) for start in range(0, len(sequences), batch_size)]

    def build(
        self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """One batch for the regular nodes [B, N']; labels of nodes outside ``label_mask`` [V] do not count."""
        supers = np.broadcast_to(self._parts, (len(regular), len(self._parts)))
        counts = (regular >= 0) & label_mask[regular]
        return self._batch(regular, supers, np.where(counts, self.graph.labels[regular], -1), share)

    def _super_nodes(self, regular: np.ndarray, supers: np.ndarray) -> _SuperRows:
        """Means over the members outside of each sequence: the sums over all, less those over the sequence's own."""
        sums = np.repeat(self._sums[None], len(regular), axis=0)
        for outside, sequence in zip(sums, regular, strict=True):
            nodes = sequence[sequence >= 0]
            own = (np.ones(len(nodes)), (self.coarsening.membership[nodes], np.arange(len(nodes))))
            one_hot = sp.csr_array(own, shape=(len(sums[0]), len(nodes)))
            features = np.empty((len(nodes), sums.shape[-1] - 2), np.float32)
            self.graph.read_features(nodes, features)
            outside[:, :-2] -= one_hot @ features
            outside[:, -2] -= one_hot @ (self.graph.indptr[nodes + 1] - self.graph.indptr[nodes])
            outside[:, -1] -= one_hot.sum(axis=1)
        sums = sums.reshape(-1, sums.shape[-1])
        size = np.maximum(sums[:, -1:], 1)
        rows = np.where(sums[:, -1] > 0, np.arange(len(sums)), -1)
        return _SuperRows(
            features=(sums[:, :-2] / size).astype(np.float32),
            degrees=_rounded(sums[:, -2] / size[:, 0]),
            rows=rows.reshape(supers.shape),
        )


def _rounded(degrees: np.ndarray) -> np.ndarray:
    return np.rint(degrees).astype(np.int64)


def prepare(
    graph: Graph,
    *,
    batching: Literal["ego", "cluster"] = "ego",
    bias: Literal["projected", "bucket"] = "projected",
    channels: int = 6,
    scope: Scope = "auto",
    max_distance: int = 8,
    global_tokens: int = 1,
    num_super: int | None = None,
    k: int = 14,
    num_samples: int = 8,
    super_ratio: float = 0.1,
    sequence_nodes: int = 1024,
    cluster_size: int | None = None,
    together: float = 0.5,
    channel_dtype: torch.dtype = torch.float32,
) -> EgoBatches | ClusterBatches:
    """All that is computed once per graph: super nodes, neighbours or clusters, and the tables of the bias.

    Args:
        channels, channel_dtype: powers of the adjacency under bias "projected", and the dtype they come in.
        max_distance: largest distance with a bucket of its own under bias "bucket".
        num_super: N_s of a sequence, with global tokens; default for ego one more than these, for cluster 64.
        k, num_samples, super_ratio: ego only; super nodes per node of the graph.
        sequence_nodes, cluster_size, together: cluster only; N', and nodes per cluster, default 300, or an eighth of N'
            where that is less.
    """
    if global_tokens < 0:
        raise ValueError(f"expected global_tokens >= 0, got {global_tokens}")
    if batching not in ("ego", "cluster"):
        raise ValueError(f"expected batching 'ego' or 'cluster', got {batching!r}")
    if bias not in ("projected", "bucket"):
        raise ValueError(f"expected bias 'projected' or 'bucket', got {bias!r}")
    ego = batching == "ego"
    if num_super is None:
        num_super = 1 + global_tokens if ego else 64
    if num_super <= global_tokens:
        raise ValueError(f"expected num_super > global_tokens, got {num_super} and {global_tokens}")
    if ego:
        if not 0 < super_ratio <= 1:
            raise ValueError(f"expected 0 < super_ratio <= 1, got {super_ratio}")
        coarsening = coarsen(graph, partition(graph, max(1, round(graph.num_nodes * super_ratio))))
    else:
        if cluster_size is None:
            cluster_size = min(_CLUSTER_NODES, max(1, sequence_nodes // 8))
        if cluster_size < 1:
            raise ValueError(f"expected cluster_size >= 1, got {cluster_size}")
        clusters = partition(graph, -(-graph.num_nodes // cluster_size))
        edges = quotient(graph, clusters)
        supers, between = merge(clusters, edges, num_super - global_tokens)
        coarsening = coarsen(graph, supers, edges=between, strongest=_COARSE_EDGES)
    structure: BiasChannels | DistanceBuckets
    if bias == "projected":
        structure = BiasChannels(
            graph,
            coarsening,
            num_powers=channels,
            global_tokens=global_tokens,
            scope=scope,
            own_super=not ego,
            dtype=channel_dtype,
        )
    else:
        structure = DistanceBuckets(graph, coarsening, max_distance=max_distance, global_tokens=global_tokens)
    if ego:
        # samples of one target differ only if there are clearly more candidates than k
        pagerank = Pagerank(graph, max_candidates=max(128, 4 * k))
        return EgoBatches(graph, coarsening, pagerank, structure, k=k, num_samples=num_samples, num_super=num_super)
    return ClusterBatches(
        graph, coarsening, clusters, edges, structure, sequence_nodes=sequence_nodes, together=together
    )
