"""Cluster batches: a sequence is whole clusters packed together, every node a target."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp

from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder, SuperRows, rounded
from megagraph.data.coarsen import Coarsening, quality
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.structure import BiasChannels, DistanceBuckets


class ClusterBatches(Builder):
    """Long sequences: whole clusters packed together, every super node of the coarsening, global tokens.

    Every node of the graph is a regular node of one sequence per epoch. N' is the option ``sequence_nodes``, or the
    size of the graph where that is smaller; N = N' + P + G with P super nodes. In every sequence a super node stands
    for its members outside of that sequence: it has the mean of their features and of their degrees, and is masked
    where there are none.

    Args:
        clusters: [V] cluster of every node, from 0 on without gaps, none in two super nodes.
        edges: between the clusters, their ``quotient``.
    """

    # the probability that the next cluster of a sequence is the one with the most edges to those in it, and not any one
    together = 0.5

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        structure: BiasChannels | DistanceBuckets,
        clusters: np.ndarray,
        edges: sp.csr_array,
        options: BatchOptions,
    ) -> None:
        super().__init__(graph, coarsening, structure)
        self.num_regular = min(options.sequence_nodes, graph.num_nodes)
        self.sequence_nodes = self.num_regular + coarsening.num_parts + options.global_tokens
        self.quality = quality(graph, clusters, edges)
        self._members = np.split(np.argsort(clusters, kind="stable"), np.cumsum(np.bincount(clusters))[:-1])
        self._edges = edges
        self._parts = np.arange(coarsening.num_parts)
        size = np.bincount(coarsening.membership)[:, None]
        degrees = np.bincount(coarsening.membership, weights=np.diff(graph.indptr))[:, None]
        self._sums = np.concatenate([coarsening.features * size.astype(np.float64), degrees, size], axis=1)

    def notes(self, bubble: float) -> list[str]:
        return [str(self.quality), *super().notes(bubble)]

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
            left[cluster], pull[cluster] = False, 0
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
        labels = self._labels(regular, label_mask)
        supers = np.broadcast_to(self._parts, (len(regular), len(self._parts)))
        return self._batch(
            len(regular), int((labels >= 0).sum()), lambda own: (regular[own], labels[own], supers[own]), share
        )

    def _super_rows(self, regular: np.ndarray, supers: np.ndarray) -> np.ndarray:
        """A row for each part of each sequence, unless all of its members are in the sequence."""
        membership, num_parts = self.coarsening.membership, len(self._parts)
        own = [np.bincount(membership[nodes[nodes >= 0]], minlength=num_parts) for nodes in regular]
        outside = self._sums[:, -1] - np.stack(own)
        return np.where(outside > 0, np.arange(outside.size).reshape(outside.shape), -1)

    def _super_nodes(self, regular: np.ndarray) -> SuperRows:
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
        return SuperRows(features=(sums[:, :-2] / size).astype(np.float32), degrees=rounded(sums[:, -2] / size[:, 0]))
