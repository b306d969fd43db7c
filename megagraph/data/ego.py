"""Ego batches: a sequence is one target node and its sampled surroundings."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder
from megagraph.data.coarsen import Coarsening, nearest_parts
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.sample import Pagerank, sample_neighbors
from megagraph.data.structure import BiasChannels, DistanceBuckets


class EgoBatches(Builder):
    """ANS-GT's batches: a sequence is one target, k = ``sample_nodes`` neighbours, super nodes, global tokens.

    The super nodes are the target's own, and of the others those with the largest entries in its row of the coarse
    adjacency; masked where there are fewer. A batch holds ``samples`` sequences of every target, those of one
    target in a row. N = 1 + k + N_s; a graph of fewer than 1 + k nodes has only so many slots for them.
    """

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        structure: BiasChannels | DistanceBuckets,
        pagerank: Pagerank,
        options: BatchOptions,
    ) -> None:
        super().__init__(graph, coarsening, structure)
        self.pagerank = pagerank
        self.samples, self._candidates = options.samples, options.num_candidates
        self.num_regular = min(1 + options.sample_nodes, max(2, graph.num_nodes))
        self.sequence_nodes = self.num_regular + options.num_super
        self._nearest = nearest_parts(coarsening.adjacency, options.num_super - options.global_tokens)

    @cached_property
    def sampling_mass(self) -> float | None:
        """Part of PageRank on others that a target samples from, see ``Pagerank.mass``."""
        return self.pagerank.mass()

    def notes(self, bubble: float) -> list[str]:
        mass = self.sampling_mass
        held = "" if mass is None else f", which hold {mass:.0%} of its PageRank on others"
        most = f"a node samples from at most {self._candidates} others{held} (--candidates, --epsilon)"
        return [most, *super().notes(bubble)]

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """Targets of every batch of an epoch: ``nodes`` in order, or shuffled by ``rng``."""
        order = nodes if rng is None else rng.permutation(nodes)
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def most(self, nodes: np.ndarray) -> int:
        return len(nodes)

    def build(
        self, targets: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """One batch for the targets [B]; labels of nodes outside ``label_mask`` [V] do not count.

        Neighbours depend on the target, the number of its sample and one draw from ``rng``, so every share samples its
        own sequences only.
        """
        seed = int(rng.integers(1 << 64, dtype=np.uint64))
        labels = self._labels(targets, label_mask)

        def nodes(sequences: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            places, which = np.unique(sequences // self.samples, return_inverse=True)
            own = targets[places]
            sampled = sample_neighbors(self.pagerank(own), own, self.samples, self.num_regular - 1, seed)
            regular = np.concatenate([own[which, None], sampled[which, sequences % self.samples]], axis=1)
            return regular, labels[places][which, None], self._nearest[self.coarsening.membership[own]][which]

        counted = self.samples * int((labels >= 0).sum())
        return self._batch(self.samples * len(targets), counted, nodes, share)
