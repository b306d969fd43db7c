"""Batches of node sequences: what the model reads, and the two ways to build it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.bias import align_columns
from megagraph.attention.layout import NodeLayout
from megagraph.data.coarsen import Coarsening, coarsen, partition
from megagraph.data.datasets import Graph
from megagraph.data.sample import Neighbors, personalized_pagerank, sample_neighbors
from megagraph.data.structure import BiasChannels, DistanceBuckets, Scope

SEQUENCE_ALIGNMENT = 128
EMBEDDED = ("features", "degrees", "node_ids", "node_index")  # fields of a batch that only the embedding reads
READ_OUT = ("labels", "target_nodes")  # and those that only the loss and the predictions read


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of every global batch that one rank builds; the default is all of it.

    The sequences are dealt out over ``dp`` ranks, and the query rows of each over ``cp`` ranks (``NodeLayout``). A
    rank goes through its sequences in ``num_microbatches`` equal runs.
    """

    dp_rank: int = 0
    dp: int = 1
    cp_rank: int = 0
    cp: int = 1
    num_microbatches: int = 1

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
        node_ids:         [K * U]           int64    of these rows: 0..V-1, super nodes from V on; -1 = a row of zeros
        node_index:       [b, S - G]        int64    row of the table, global tokens have none; 0 on padding
        structure:        [b, C + G, S, N]  float32  channels of ``ProjectedBias``, or
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
        kernel_dtype: torch.dtype | None = None,
        leave: Collection[str] = (),
        non_blocking: bool = False,
    ) -> Batch:
        """The batch on ``device``, but for the fields to ``leave``.

        For the kernels, channels come in their dtype and structure is laid out for wide loads.
        """
        batch = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking), leave)
        if kernel_dtype is None:
            return batch
        structure = batch.structure.to(kernel_dtype) if batch.structure.is_floating_point() else batch.structure
        return replace(batch, structure=align_columns(structure))

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor], leave: Collection[str] = ()) -> Batch:
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name not in leave)
        mapped: dict[str, Any] = {name: function(value) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **mapped)


class _Builder:
    """What both kinds of batch share: from node ids to a ``Batch``."""

    def __init__(self, graph: Graph, coarsening: Coarsening, structure: BiasChannels | DistanceBuckets) -> None:
        self.graph = graph
        self.coarsening = coarsening
        self.structure = structure
        self._super_features = torch.from_numpy(coarsening.features)
        degrees, members = np.diff(graph.indptr), np.bincount(coarsening.membership)
        super_degrees = np.rint(np.bincount(coarsening.membership, weights=degrees) / members)
        self._degrees = torch.from_numpy(np.concatenate([degrees, super_degrees]).astype(np.int64))

    @property
    def num_rows(self) -> int:
        """Nodes and super nodes."""
        return len(self._degrees)

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
        features, degrees, node_ids, node_index = self._row_tables(regular[:, block], supers, layout, num_microbatches)
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
        self, block: np.ndarray, supers: np.ndarray, layout: NodeLayout, num_microbatches: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A rank's regular nodes [b, <= R] and super nodes [b, N_s - G] -> features, degrees, node_ids, node_index."""
        # one numbering for both: nodes first, then super nodes
        slots = np.full((len(block), layout.block_size + supers.shape[1]), -1)
        slots[:, : block.shape[1]] = block
        slots[:, layout.block_size :] = supers + self.graph.num_nodes
        padding = slots < 0
        tables, indices = [], []
        for run in np.split(slots, num_microbatches):
            # padding takes a row that is there anyway, a super node: regular nodes may all be padding
            rows, index = np.unique(np.where(run < 0, run[0, -1], run), return_inverse=True)
            tables.append(rows)
            indices.append(index.reshape(run.shape))
        node_index = np.concatenate(indices)
        node_index[padding] = 0
        num_rows = max(map(len, tables))
        features = torch.empty(num_microbatches, num_rows, self.graph.in_features)
        node_ids = torch.full((num_microbatches, num_rows), -1)
        for table, ids, rows in zip(features, node_ids, tables, strict=True):
            num_graph_rows = int(np.searchsorted(rows, self.graph.num_nodes))
            super_rows = torch.from_numpy(rows[num_graph_rows:] - self.graph.num_nodes)
            self.graph.read_features(rows[:num_graph_rows], table[:num_graph_rows].numpy())
            torch.index_select(self._super_features, 0, super_rows, out=table[num_graph_rows : len(rows)])
            table[len(rows) :] = 0
            ids[: len(rows)] = torch.from_numpy(rows)
        node_ids = node_ids.flatten()
        degrees = self._degrees[node_ids].masked_fill(node_ids < 0, 0)
        return features.flatten(0, 1), degrees, node_ids, torch.from_numpy(node_index)


class EgoBatches(_Builder):
    """ANS-GT's batches: a sequence is one target, k sampled neighbours, the target's super node, global tokens.

    A batch holds ``num_samples`` sequences of every target, those of one target in a row. N = k + 2 + G.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        neighbors: Neighbors,
        structure: BiasChannels | DistanceBuckets,
        *,
        k: int = 14,
        num_samples: int = 8,
    ) -> None:
        if k < 1 or num_samples < 1:
            raise ValueError(f"expected k and num_samples of at least 1, got {k} and {num_samples}")
        super().__init__(graph, coarsening, structure)
        self.neighbors = neighbors
        self.k = k
        self.num_samples = num_samples

    @property
    def sequence_nodes(self) -> int:
        """N."""
        return self.k + 2 + self.structure.global_tokens

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
        sampled = sample_neighbors(self.neighbors, targets, self.num_samples, self.k, rng)
        targets = np.repeat(targets, self.num_samples)[:, None]
        regular = np.concatenate([targets, sampled.reshape(len(targets), self.k)], axis=1)
        supers = self.coarsening.membership[targets].astype(np.int64)
        return self._batch(regular, supers, np.where(label_mask[targets], self.graph.labels[targets], -1), share)


class ClusterBatches(_Builder):
    """Long sequences: whole clusters packed together, every super node of the coarsening, global tokens.

    Every node of the graph is a regular node of one sequence per epoch. N' is ``sequence_nodes``, or the size
    of the graph where that is smaller; N = N' + P + G with P super nodes.

    Args:
        clusters: [V] cluster of every node, from 0 on without gaps.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        clusters: np.ndarray,
        structure: BiasChannels | DistanceBuckets,
        *,
        sequence_nodes: int = 1024,
    ) -> None:
        if sequence_nodes < 1 or sequence_nodes % SEQUENCE_ALIGNMENT:
            raise ValueError(f"expected sequence_nodes to be a multiple of {SEQUENCE_ALIGNMENT}, got {sequence_nodes}")
        super().__init__(graph, coarsening, structure)
        self.num_regular = min(sequence_nodes, graph.num_nodes)
        members = np.split(np.argsort(clusters, kind="stable"), np.cumsum(np.bincount(clusters))[:-1])
        # a cluster longer than a sequence is cut
        self._pieces = [
            nodes[start : start + self.num_regular]
            for nodes in members
            for start in range(0, len(nodes), self.num_regular)
        ]
        self._supers = np.arange(coarsening.num_parts)

    @property
    def sequence_nodes(self) -> int:
        """N."""
        return self.num_regular + len(self._supers) + self.structure.global_tokens

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Regular nodes [B, N'] of every batch of an epoch: clusters in order, or shuffled by ``rng``.

        All nodes of the graph take part, as context, whichever ``nodes`` count.
        """
        order = range(len(self._pieces)) if rng is None else rng.permutation(len(self._pieces))
        sequences = []
        room = 0
        for piece in order:
            members = self._pieces[piece]
            if len(members) > room:
                sequences.append(np.full(self.num_regular, -1, np.int64))
                room = self.num_regular
            start = self.num_regular - room
            sequences[-1][start : start + len(members)] = members
            room -= len(members)
        return [np.stack(sequences[start : start + batch_size]) for start in range(0, len(sequences), batch_size)]

    def build(
        self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """One batch for the regular nodes [B, N']; labels of nodes outside ``label_mask`` [V] do not count."""
        supers = np.broadcast_to(self._supers, (len(regular), len(self._supers)))
        counts = (regular >= 0) & label_mask[regular]
        return self._batch(regular, supers, np.where(counts, self.graph.labels[regular], -1), share)


def prepare(
    graph: Graph,
    *,
    batching: Literal["ego", "cluster"] = "ego",
    bias: Literal["projected", "bucket"] = "projected",
    channels: int = 6,
    scope: Scope = "auto",
    max_distance: int = 8,
    global_tokens: int = 1,
    k: int = 14,
    num_samples: int = 8,
    super_ratio: float = 0.1,
    sequence_nodes: int = 1024,
    cluster_size: int = 64,
    num_super: int = 64,
) -> EgoBatches | ClusterBatches:
    """All that is computed once per graph: super nodes, neighbours or clusters, and the tables of the bias.

    Args:
        channels: powers of the adjacency under bias "projected".
        max_distance: largest distance with a bucket of its own under bias "bucket".
        k, num_samples, super_ratio: ego only; super nodes per node of the graph.
        sequence_nodes, cluster_size, num_super: cluster only; N', nodes per cluster, and N_s with global tokens.
    """
    if global_tokens < 0:
        raise ValueError(f"expected global_tokens >= 0, got {global_tokens}")
    if batching == "ego":
        if not 0 < super_ratio <= 1:
            raise ValueError(f"expected 0 < super_ratio <= 1, got {super_ratio}")
        num_parts = max(1, round(graph.num_nodes * super_ratio))
    elif batching == "cluster":
        if num_super <= global_tokens:
            raise ValueError(f"expected num_super > global_tokens, got {num_super} and {global_tokens}")
        if cluster_size < 1:
            raise ValueError(f"expected cluster_size >= 1, got {cluster_size}")
        num_parts = min(num_super - global_tokens, graph.num_nodes)
    else:
        raise ValueError(f"expected batching 'ego' or 'cluster', got {batching!r}")
    coarsening = coarsen(graph, num_parts)
    structure: BiasChannels | DistanceBuckets
    if bias == "projected":
        structure = BiasChannels(graph, coarsening, num_powers=channels, global_tokens=global_tokens, scope=scope)
    elif bias == "bucket":
        structure = DistanceBuckets(graph, coarsening, max_distance=max_distance, global_tokens=global_tokens)
    else:
        raise ValueError(f"expected bias 'projected' or 'bucket', got {bias!r}")
    if batching == "ego":
        # samples of one target differ only if there are clearly more candidates than k
        neighbors = personalized_pagerank(graph, max_candidates=max(128, 4 * k))
        return EgoBatches(graph, coarsening, neighbors, structure, k=k, num_samples=num_samples)
    clusters = partition(graph, -(-graph.num_nodes // cluster_size))
    return ClusterBatches(graph, coarsening, clusters, structure, sequence_nodes=sequence_nodes)
