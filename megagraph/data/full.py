"""Full batches: the whole graph is one sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from megagraph.attention.layout import NodeLayout
from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder
from megagraph.data.coarsen import Coarsening
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.pairs import PairBuckets

# what a row costs, in dense pairs, of which it has two with every super node: those of its own, and of theirs
_PAIR = 3  # one that is listed
_DENSE = 256  # the projections and the feed-forward layers of d = 128


def row_costs(num_pairs: np.ndarray, num_super: int) -> np.ndarray:
    """Work of nodes that have so many pairs, int64 [V]."""
    return _PAIR * num_pairs.astype(np.int64) + 2 * num_super + _DENSE


class FullBatches(Builder):
    """One sequence: all nodes in the order of their clusters, every super node of the coarsening, global tokens.

    A batch is the same each time but for its labels, so it is built once. N = V + P + G with P super nodes.
    Ranks hold whole clusters, as many as make their work equal.

    Args:
        order: [V], the node at every regular slot.
        clusters: [V], of the nodes, which ascend in this order.
    """

    structure: PairBuckets

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        structure: PairBuckets,
        options: BatchOptions,
        order: np.ndarray,
        clusters: np.ndarray,
    ) -> None:
        super().__init__(graph, coarsening, structure)
        self.order = order
        self.num_regular = graph.num_nodes
        num_super = coarsening.num_parts + options.global_tokens
        self.sequence_nodes = graph.num_nodes + num_super
        self._ends = np.flatnonzero(np.diff(clusters[order])) + 1
        self._work = row_costs(structure.relation.row_starts.diff().numpy(), num_super).cumsum()
        self._built: dict[Share, Batch] = {}
        self._known, self._part = np.zeros(graph.num_nodes, bool), 0.0

    def show_labels(self, nodes: np.ndarray, part: float) -> None:
        """Labels of ``nodes`` become columns of the features, of 0 and 1 (Shi et al., 2021).

        Where no others count, in training, they are of a random part of these nodes, which then does not count; else of
        all of them. So nobody is asked for a label that is input.
        """
        self._known[nodes], self._part = True, part
        self.label_columns = self.graph.num_classes

    def layout(self, num_nodes: int, num_super: int, share: Share) -> NodeLayout:
        cuts = None if share.cp == 1 else self.cuts(share.cp)
        return NodeLayout(num_nodes, num_super, share.cp_rank, share.cp, cuts)

    def cuts(self, world_size: int) -> tuple[int, ...]:
        """Where the slots are cut for so many ranks: where a cluster ends, if there are enough of these."""
        wanted = self._work[-1] * np.arange(1, world_size) / world_size
        for ends in (self._ends, np.arange(1, self.num_regular)):
            nearest = np.abs(self._work[ends - 1] - wanted[:, None]).argmin(axis=1) if len(ends) else np.zeros(0, int)
            cuts = np.array([0, *ends[nearest], self.num_regular])
            if len(cuts) == world_size + 1 and (np.diff(cuts) > 0).all():
                return tuple(cuts.tolist())
        return tuple(self.num_regular * rank // world_size for rank in range(world_size + 1))

    def halo(self, world_size: int) -> list[int]:
        """Regular rows of others that each of so many ranks names."""
        relation, rows = self.structure.relation, []
        starts, columns = relation.row_starts.numpy(), relation.columns.numpy()
        for first, last in pairwise(self.cuts(world_size)):
            named = np.zeros(self.num_regular, bool)  # marked, as sorting all of a large graph's pairs takes a minute
            named[columns[starts[first] : starts[last]]] = True
            named[first:last] = False
            rows.append(int(named.sum()))
        return rows

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """One batch; whichever ``nodes`` count, all take part."""
        return [self.order[None]]

    def build(
        self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """The batch; labels of nodes outside ``label_mask`` [V] do not count."""
        if share not in self._built:
            supers, everyone = np.arange(self.coarsening.num_parts)[None], self.graph.labels[regular]
            self._built[share] = self._batch(1, 0, lambda own: (regular[own], everyone[own], supers[own]), share)
        built = self._built[share]
        if self.label_columns:
            shown = self._shown(label_mask, rng)
            label_mask = label_mask & ~shown
            built = replace(built, features=torch.cat([built.features, self._columns(built, shown)], dim=1))
        labels = self._labels(regular, label_mask)
        block = built.layout.block()
        here = torch.from_numpy(np.ascontiguousarray(labels[:, block.start : block.stop]))
        return replace(built, labels=here, num_targets=int((labels >= 0).sum()))

    def _shown(self, label_mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Whose labels are input, bool [V]."""
        if (label_mask & ~self._known).any():
            return self._known
        drawn = self._known & (rng.random(len(self._known)) < self._part)
        return drawn if (label_mask & ~drawn).any() else np.zeros_like(drawn)

    def _columns(self, batch: Batch, shown: np.ndarray) -> torch.Tensor:
        """Of every row of its features, [U, classes]."""
        nodes = batch.node_ids.numpy()
        rows = np.flatnonzero((nodes >= 0) & (nodes < len(shown)))
        rows = rows[shown[nodes[rows]]]
        columns, labels = torch.zeros(len(nodes), self.label_columns), torch.from_numpy(self.graph.labels[nodes[rows]])
        several = labels if self.graph.multi_label else torch.nn.functional.one_hot(labels, self.label_columns)
        columns[torch.from_numpy(rows)] = (several == 1).float()
        return columns
