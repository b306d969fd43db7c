"""Batches of node sequences: what the model reads, and the two ways to build it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megagraph.data.coarsen import Coarsening, coarsen, partition
from megagraph.data.datasets import Graph
from megagraph.data.sample import Neighbors, personalized_pagerank, sample_neighbors
from megagraph.data.structure import BiasChannels, DistanceBuckets, Scope

SEQUENCE_ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """B sequences of N slots: N' regular nodes, then N_s super nodes, the last G of them global tokens.

    The first T regular slots are read out. U distinct rows of features serve all sequences. Shapes:
        features:         [U, d_in]         float32  raw features of the batch's nodes and super nodes
        node_index:       [B, N - G]        int64    row of ``features``, global tokens have none; 0 on padding
        structure:        [B, C + G, N, N]  float32  channels of ``ProjectedBias``, or
                          [B, N, N]         uint8    buckets of ``BucketBias``
        key_padding_mask: [B, N]            bool     True = padding
        labels:           [B, T]            int64    class, -1 = does not count
        target_nodes:     [B, T]            int64    node id, -1 = padding
        sequence_ids:     [B]               int64    position in the global batch
    """

    features: Tensor
    node_index: Tensor
    structure: Tensor
    key_padding_mask: Tensor
    labels: Tensor
    target_nodes: Tensor
    sequence_ids: Tensor
    num_regular: int
    num_super: int

    @property
    def batch_size(self) -> int:
        return self.key_padding_mask.shape[0]

    @property
    def num_nodes(self) -> int:
        """N, all slots of a sequence."""
        return self.key_padding_mask.shape[1]

    @property
    def num_targets(self) -> int:
        """Labels that count."""
        return int((self.labels >= 0).sum())

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        mapped: dict[str, Any] = {name: function(value) for name, value in values if isinstance(value, Tensor)}
        return replace(self, **mapped)


class _Builder:
    """What both kinds of batch share: from node ids to a ``Batch``."""

    def __init__(self, graph: Graph, coarsening: Coarsening, structure: BiasChannels | DistanceBuckets) -> None:
        self.graph = graph
        self.coarsening = coarsening
        self.structure = structure
        self._features = torch.from_numpy(graph.features)
        self._super_features = torch.from_numpy(coarsening.features)

    def _batch(self, regular: np.ndarray, supers: np.ndarray, labels: np.ndarray) -> Batch:
        """Regular nodes [B, N'] (-1 = padding), super nodes [B, N_s - G], labels [B, T] -> Batch."""
        num_sequences, num_regular = regular.shape
        num_super = supers.shape[1] + self.structure.global_tokens
        padding = np.zeros((num_sequences, num_regular + num_super), bool)
        padding[:, :num_regular] = regular < 0
        # one numbering for both: nodes first, then super nodes; padding takes a row that is there anyway
        slots = np.concatenate([regular, supers + self.graph.num_nodes], axis=1)
        slots[slots < 0] = slots[0, 0]
        rows, node_index = np.unique(slots, return_inverse=True)
        node_index = node_index.reshape(slots.shape)
        node_index[padding[:, : slots.shape[1]]] = 0
        num_graph_rows = int(np.searchsorted(rows, self.graph.num_nodes))
        features = torch.empty(len(rows), self.graph.in_features)
        torch.index_select(self._features, 0, torch.from_numpy(rows[:num_graph_rows]), out=features[:num_graph_rows])
        super_rows = torch.from_numpy(rows[num_graph_rows:] - self.graph.num_nodes)
        torch.index_select(self._super_features, 0, super_rows, out=features[num_graph_rows:])
        return Batch(
            features=features,
            node_index=torch.from_numpy(node_index),
            structure=self.structure.build(regular, supers),
            key_padding_mask=torch.from_numpy(padding),
            labels=torch.from_numpy(labels),
            target_nodes=torch.from_numpy(np.ascontiguousarray(regular[:, : labels.shape[1]])),
            sequence_ids=torch.arange(num_sequences),
            num_regular=num_regular,
            num_super=num_super,
        )


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

    def build(self, targets: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator) -> Batch:
        """One batch for the targets [B]; labels of nodes outside ``label_mask`` [V] do not count."""
        sampled = sample_neighbors(self.neighbors, targets, self.num_samples, self.k, rng)
        targets = np.repeat(targets, self.num_samples)[:, None]
        regular = np.concatenate([targets, sampled.reshape(len(targets), self.k)], axis=1)
        supers = self.coarsening.membership[targets].astype(np.int64)
        return self._batch(regular, supers, np.where(label_mask[targets], self.graph.labels[targets], -1))


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

    def build(self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator) -> Batch:
        """One batch for the regular nodes [B, N']; labels of nodes outside ``label_mask`` [V] do not count."""
        supers = np.broadcast_to(self._supers, (len(regular), len(self._supers)))
        counts = (regular >= 0) & label_mask[regular]
        return self._batch(regular, supers, np.where(counts, self.graph.labels[regular], -1))


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
