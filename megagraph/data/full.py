"""Full batches: the whole graph is one sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder
from megagraph.data.coarsen import Coarsening
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.pairs import PairBuckets


class FullBatches(Builder):
    """One sequence: all nodes in the order of their clusters, every super node of the coarsening, global tokens.

    A batch is the same each time but for the labels that count, so it is built once. N = V + P + G with P super nodes.

    Args:
        order: [V], the node at every regular slot.
    """

    structure: PairBuckets

    def __init__(
        self, graph: Graph, coarsening: Coarsening, structure: PairBuckets, options: BatchOptions, order: np.ndarray
    ) -> None:
        super().__init__(graph, coarsening, structure)
        self.order = order
        self.num_regular = graph.num_nodes
        self.sequence_nodes = graph.num_nodes + coarsening.num_parts + options.global_tokens
        self._built: Batch | None = None

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """One batch; whichever ``nodes`` count, all take part."""
        return [self.order[None]]

    def build(
        self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """The batch; labels of nodes outside ``label_mask`` [V] do not count."""
        if self._built is None:
            supers = np.arange(self.coarsening.num_parts)[None]
            self._built = self._batch(lambda sequences: regular[sequences], supers, self.graph.labels[regular], share)
        labels = np.where(label_mask[regular], self.graph.labels[regular], -1)
        return replace(self._built, labels=torch.from_numpy(labels), num_targets=int((labels >= 0).sum()))
