"""Full batches: the whole graph is one sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.relation import Relation
from megagraph.data.batch import WHOLE, Batch, Share
from megagraph.data.build import Builder
from megagraph.data.coarsen import Coarsening, normalized_adjacency
from megagraph.data.graph import Graph
from megagraph.data.options import BatchOptions
from megagraph.data.pairs import PairBuckets

# what a row costs, in dense pairs, of which it has two with every super node: those of its own, and of theirs
_PAIR = 3  # one that is listed
_DENSE = 256  # the projections and the feed-forward layers of d = 128

_NEIGHBOUR_BYTES = 4 * 4  # an entry of A~: its column, row, place and weight

PIECES = 64  # of a partition, at most: steps differ from epoch to epoch the more, the more they are


def row_costs(num_pairs: np.ndarray, num_super: int) -> np.ndarray:
    """Work of nodes that have so many pairs, int64 [V]."""
    return _PAIR * num_pairs.astype(np.int64) + 2 * num_super + _DENSE


def cut(work: np.ndarray, ends: np.ndarray, number: int) -> tuple[int, ...]:
    """Where slots in a row are cut into so many parts of equal work: where a cluster ends, if enough of these do.

    Args:
        work: [n], of every slot.
        ends: slots that begin a cluster, but for the first.

    Returns:
        number + 1 slots, from 0 to n.
    """
    done = work.cumsum()
    wanted = done[-1] * np.arange(1, number) / number
    for places in (ends, np.arange(1, len(work))):
        if len(places) < number - 1:
            continue
        before = done[places - 1]
        above = np.searchsorted(before, wanted).clip(max=len(places) - 1)
        below = (above - 1).clip(min=0)
        nearest = np.where(wanted - before[below] <= before[above] - wanted, below, above)
        cuts = np.array([0, *places[nearest], len(work)])
        if (np.diff(cuts) > 0).all():
            return tuple(cuts.tolist())
    return tuple(len(work) * part // number for part in range(number + 1))


class FullBatches(Builder):
    """One sequence: all nodes in the order of their clusters, every super node of the coarsening, global tokens.

    A batch is the same each time but for its labels, so it is built once. N = V + P + G with P super nodes.
    Ranks hold whole clusters, as many as make their work equal.

    Training may take its steps on partitions, as Cluster-GCN does (Chiang et al., 2019): every epoch deals the pieces
    of the graph out to them anew. Nodes of one partition attend to each other where they do in the whole graph, and to
    all super nodes, which attend to them; all else, features, degrees, buckets, is that of the whole graph, but for the
    weights of a convolution, which are of the partition.

    Args:
        order: [V], the node at every regular slot.
        ends: the slots that begin a cluster, but for the first.
        pieces: the slots where each of them begins, and V.
    """

    structure: PairBuckets

    def __init__(
        self,
        graph: Graph,
        coarsening: Coarsening,
        structure: PairBuckets,
        options: BatchOptions,
        order: np.ndarray,
        ends: np.ndarray,
        pieces: tuple[int, ...],
    ) -> None:
        super().__init__(graph, coarsening, structure)
        self.order, self.pieces, self.partitions = order, pieces, options.partitions
        self._tells_neighbours = options.convolution
        self.num_regular = graph.num_nodes
        num_super = coarsening.num_parts + options.global_tokens
        self.sequence_nodes = graph.num_nodes + num_super
        self._ends = ends
        self._built: dict[Share, Batch] = {}  # of the whole graph
        self._known, self._part = np.zeros(graph.num_nodes, bool), 0.0

    def show_labels(self, nodes: np.ndarray, part: float) -> None:
        """Labels of ``nodes`` become columns of the features, of 0 and 1 (Shi et al., 2021).

        Where no others count, in training, they are of a random part of these nodes, which then does not count; else of
        all of them. So nobody is asked for a label that is input.
        """
        self._known[nodes], self._part = True, part
        self.label_columns = self.graph.num_classes

    def layout(self, num_nodes: int, num_super: int, share: Share, slots: np.ndarray | None = None) -> NodeLayout:
        cuts = None if share.cp == 1 else self.cuts(share.cp, slots)
        return NodeLayout(num_nodes, num_super, share.cp_rank, share.cp, cuts)

    def num_bytes(self, batch_size: int, share: Share) -> int:
        num_bytes = super().num_bytes(batch_size, share)
        if not self._tells_neighbours:
            return num_bytes
        layout = self.layout(self.num_regular, self.sequence_nodes - self.num_regular, share)
        own = self.order[layout.block().start : layout.block().stop]
        degrees = self.graph.indptr[own + 1] - self.graph.indptr[own]
        return num_bytes + _NEIGHBOUR_BYTES * int((degrees + 1).sum())

    def slots(self, regular: np.ndarray) -> np.ndarray:
        """Slots of the regular nodes [1, N'] of a batch, int64 [N'], ascending."""
        return self.structure.slots(self._relabelled(regular))

    def cuts(self, world_size: int, slots: np.ndarray | None = None) -> tuple[int, ...]:
        """Where these slots, numbered from 0 on (default: all), are cut for so many ranks."""
        slots = np.arange(self.num_regular) if slots is None else slots
        pairs = self.structure.among(slots)[0].row_starts.diff().numpy()
        ends = np.flatnonzero(np.isin(slots, self._ends))
        return cut(row_costs(pairs, self.sequence_nodes - self.num_regular), ends[ends > 0], world_size)

    def halo(self, world_size: int, slots: np.ndarray | None = None) -> list[int]:
        """Regular rows of others that each of so many ranks names."""
        slots = np.arange(self.num_regular) if slots is None else slots
        relation, rows = self.structure.among(slots)[0], []
        starts, columns = relation.row_starts.numpy(), relation.columns.numpy()
        for first, last in pairwise(self.cuts(world_size, slots)):
            named = np.zeros(len(slots), bool)  # marked, as sorting all of a large graph's pairs takes a minute
            named[columns[starts[first] : starts[last]]] = True
            named[first:last] = False
            rows.append(int(named.sum()))
        return rows

    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """One batch, of all nodes whichever ``nodes`` count; with ``rng``, in training, one of each partition."""
        if rng is None:
            return [self.order[None]]
        pieces = np.split(self.order, self.pieces[1:-1])
        dealt = np.array_split(rng.permutation(len(pieces)), self.partitions)
        return [np.concatenate([pieces[i] for i in np.sort(own)])[None] for own in dealt]

    def build(
        self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE
    ) -> Batch:
        """The batch; labels of nodes outside ``label_mask`` [V] do not count."""
        is_whole = regular.size == self.num_regular
        built = self._built.get(share) if is_whole else None
        if built is None:
            supers, everyone = np.arange(self.coarsening.num_parts)[None], self.graph.labels[regular]
            slots = self.slots(regular)
            built = self._batch(1, 0, lambda own: (regular[own], everyone[own], supers[own]), share, slots)
            if self._tells_neighbours:
                built = replace(built, neighbours=self._neighbours(regular[0]).shard(built.layout))
            if is_whole:
                self._built[share] = built.pin_memory() if torch.cuda.is_initialized() else built  # not in every step
        if self.label_columns:
            shown = self._shown(regular, label_mask, rng)
            label_mask = label_mask & ~shown
            built = replace(built, features=torch.cat([built.features, self._columns(built, shown)], dim=1))
        labels = self._labels(regular, label_mask)
        block = built.layout.block()
        here = torch.from_numpy(np.ascontiguousarray(labels[:, block.start : block.stop]))
        return replace(built, labels=here, num_targets=int((labels >= 0).sum()))

    def _neighbours(self, nodes: np.ndarray) -> Neighbours:
        """Rows of A~ among these nodes, as they follow in the sequence."""
        matrix = normalized_adjacency(self.graph.adjacency[nodes][:, nodes])
        starts, columns = torch.from_numpy(matrix.indptr).long(), torch.from_numpy(matrix.indices).int()
        return Neighbours(Relation.of_rows(starts, columns, len(nodes), 1), torch.from_numpy(matrix.data))

    def _shown(self, regular: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Which nodes' labels are input, bool [V]."""
        if (label_mask & ~self._known).any():
            return self._known
        drawn = self._known & (rng.random(len(self._known)) < self._part)
        return drawn if (label_mask & ~drawn)[regular].any() else np.zeros_like(drawn)

    def _columns(self, batch: Batch, shown: np.ndarray) -> torch.Tensor:
        """Labels that are input, as 0 or 1 beside every row of a batch's features, [U, classes]."""
        nodes = batch.node_ids.numpy()
        rows = np.flatnonzero((nodes >= 0) & (nodes < len(shown)))
        rows = rows[shown[nodes[rows]]]
        columns = torch.zeros(len(nodes), self.label_columns, dtype=torch.float32)
        labels = torch.from_numpy(self.graph.labels[nodes[rows]])
        several = labels if self.graph.multi_label else torch.nn.functional.one_hot(labels, self.label_columns)
        columns[torch.from_numpy(rows)] = (several == 1).float()
        return columns

    def notes(self, bubble: float) -> list[str]:
        said = [str(self.structure)]
        if self.partitions > 1:
            said.append(self._of_partitions())
        if bubble:
            said.append(f"stages have one sequence to work on: each rank waits {bubble:.0%} of a step for others")
        return said

    def _of_partitions(self) -> str:
        sizes, relation = np.diff(self.pieces), self.structure.relation
        of_slots = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
        of_rows = np.repeat(of_slots, relation.row_starts.diff().numpy())
        within = float((of_rows == of_slots[relation.columns.numpy()]).mean())
        meet = (len(sizes) / self.partitions - 1) / max(len(sizes) - 1, 1)  # of all pairs of pieces
        return (
            f"training takes {self.partitions} steps an epoch, to which {len(sizes)} pieces of {min(sizes):,} to "
            f"{max(sizes):,} nodes are dealt out anew every time; {within:.0%} of the pairs are within a piece, "
            f"{within + meet * (1 - within):.0%} attend in an epoch"
        )
