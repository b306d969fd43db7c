"""From node ids to a batch: what ego and cluster batches have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.layout import NodeLayout
from megagraph.data.batch import EMBEDDED, WHOLE, Batch, Share, no_rows
from megagraph.data.coarsen import Coarsening
from megagraph.data.graph import Graph
from megagraph.data.pairs import PairBuckets
from megagraph.data.structure import BiasChannels, DistanceBuckets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SuperRows:
    """Features float32 [Q, d_in] and degrees int64 [Q] of rows, row q that of part q % P."""

    features: np.ndarray
    degrees: np.ndarray


class Builder(ABC):
    """What both kinds of batches share."""

    num_regular: int  # N'
    sequence_nodes: int  # N
    samples = 1  # sequences of a target
    relabel: np.ndarray | None = None  # [V]: the bias of a node is that of another one
    label_columns = 0  # of the features, after those of the graph

    def __init__(
        self, graph: Graph, coarsening: Coarsening, structure: BiasChannels | DistanceBuckets | PairBuckets
    ) -> None:
        self.graph = graph
        self.coarsening = coarsening
        self.structure = structure
        members = np.bincount(coarsening.membership)
        degrees = np.bincount(coarsening.membership, weights=np.diff(graph.indptr)) / members
        self._super_degrees = rounded(degrees)

    def layout(self, num_nodes: int, num_super: int, share: Share, slots: np.ndarray | None = None) -> NodeLayout:
        """Layout of so many regular and super nodes over the ranks of a share; ``slots``: as for ``_batch``."""
        return NodeLayout(num_nodes, num_super, share.cp_rank, share.cp)

    def _bias_layout(self, layout: NodeLayout, share: Share) -> NodeLayout:
        """Layout of the rows of the bias: all of them where the share asks for the whole bias."""
        return NodeLayout(layout.num_nodes, layout.num_super) if share.whole_bias else layout

    def _super_rows(self, regular: np.ndarray, supers: np.ndarray) -> np.ndarray:
        """Which row every super node [b, N_s - G] has beside the regular nodes [b, N'], -1 = masked."""
        return supers

    def _super_nodes(self, regular: np.ndarray) -> SuperRows:
        """Rows of super nodes, for sequences with the regular nodes [b, N']."""
        return SuperRows(features=self.coarsening.features, degrees=self._super_degrees)

    def num_bytes(self, batch_size: int, share: Share) -> int:
        """The most that a rank's share of a batch of so many targets (ego) or sequences (cluster) takes.

        Raises:
            ValueError: its channels take more than ``structure.MAX_CHANNEL_BYTES``.
        """
        num_super = self.sequence_nodes - self.num_regular
        layout = self.layout(self.num_regular, num_super, share)
        num_sequences = share.num_sequences(batch_size * self.samples)
        row_bytes = 4 * self.in_features + 4 * 8  # features; degrees, ids, index, targets
        row_bytes += self.graph.labels[:1].nbytes
        rest = num_sequences * (layout.num_local * row_bytes + layout.num_columns + 8)
        return self.structure.num_bytes(num_sequences, self._bias_layout(layout, share)) + rest

    def most(self, nodes: np.ndarray) -> int:
        """More targets (ego) or sequences (cluster) than these are in no batch of ``nodes``, whatever its size."""
        return 2 * self.graph.num_nodes // self.num_regular + 1  # any two in a row hold more than one could

    @abstractmethod
    def plan(self, nodes: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """What the batches of an epoch, in which the labels of ``nodes`` count, are built from; ``rng`` shuffles."""

    @abstractmethod
    def build(self, item: np.ndarray, label_mask: np.ndarray, rng: np.random.Generator, share: Share = WHOLE) -> Batch:
        """One batch from an item of the plan; labels of nodes outside ``label_mask`` [V] do not count."""

    def notes(self, bubble: float) -> list[str]:
        """What is worth knowing of how the graph became sequences, where stages wait for others so much of a step."""
        return [str(self.structure.powers)] if isinstance(self.structure, BiasChannels) else []

    @property
    def in_features(self) -> int:
        """Width d_in of the features of batches."""
        return self.graph.in_features + self.label_columns

    @property
    def num_rows(self) -> int:
        """Number of rows: nodes and super nodes."""
        return self.graph.num_nodes + self.coarsening.num_parts

    def _batch(
        self,
        size: int,
        num_targets: int,
        nodes_of: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]],
        share: Share,
        slots: np.ndarray | None = None,
    ) -> Batch:
        """The share of a batch of so many sequences and labels that count.

        Args:
            nodes_of: sequences int64 [b] of 0..B - 1 -> new arrays of their regular nodes [b, N'] and labels [b, T] or
                [b, T, C], -1 = padding or does not count, and their super nodes [b, N_s - G].
            slots: of the regular nodes, int64 [N'], where all nodes of the graph have one; ``None``: all of these.
        """
        num_microbatches = share.num_microbatches
        own, num_sequences = share.sequences(size), share.num_sequences(size)
        ids = np.full(num_sequences, size)
        ids[: len(own)] = own
        empty = ids == size
        # an empty one samples no other nodes
        regular, labels, supers = nodes_of(np.where(empty, min(own.start, size - 1), ids))
        regular[empty] = labels[empty] = -1
        num_super = supers.shape[1] + self.structure.global_tokens
        layout = self.layout(regular.shape[1], num_super, share, slots)
        block = slice(layout.block().start, layout.block().stop)

        padding = np.zeros((num_sequences, layout.num_columns), bool)
        padding[:, : layout.num_nodes] = regular < 0
        rows = self._super_rows(regular, supers)
        supers = np.where(rows < 0, -1, supers)
        padding[:, layout.num_nodes : layout.num_nodes + supers.shape[1]] = supers < 0
        if share.embeds:
            tables = self._row_tables(
                regular[:, block], rows, self._super_nodes(regular), empty, layout, num_microbatches
            )
        else:
            tables = no_rows(self.graph.in_features)
        return Batch(
            **tables,
            structure=self.structure.build(self._relabelled(regular), supers, self._bias_layout(layout, share)),
            key_padding_mask=torch.from_numpy(padding),
            # only T slots have labels: a block beyond them slices nothing
            labels=torch.from_numpy(np.ascontiguousarray(labels[:, block])),
            target_nodes=torch.from_numpy(np.ascontiguousarray(regular[:, : labels.shape[1]][:, block])),
            sequence_ids=torch.from_numpy(ids),
            layout=layout,
            num_targets=num_targets,
            neighbours=None,
        )

    def _labels(self, nodes: np.ndarray, label_mask: np.ndarray) -> np.ndarray:
        """Labels of nodes of any shape, -1 = padding; -1 where they do not count."""
        labels: np.ndarray = self.graph.labels[nodes]
        labels[(nodes < 0) | ~label_mask[nodes]] = -1
        return labels

    def _relabelled(self, regular: np.ndarray) -> np.ndarray:
        return regular if self.relabel is None else np.where(regular < 0, -1, self.relabel[regular])

    def _row_tables(
        self,
        block: np.ndarray,
        rows_of_supers: np.ndarray,
        supers: SuperRows,
        empty: np.ndarray,
        layout: NodeLayout,
        num_microbatches: int,
    ) -> dict[str, Tensor]:
        """A rank's regular nodes [b, <= R], rows of super nodes [b, N_s - G], all these rows, empty sequences [b] ->
        the fields of a batch that an embedding reads.

        The features are as wide as those of super nodes: a learned embedding has none.
        """
        # one numbering for both: nodes first, then super nodes
        num_nodes = self.graph.num_nodes
        slots = np.full((len(block), layout.block_size + rows_of_supers.shape[1]), -1)
        slots[:, : block.shape[1]] = block
        slots[:, layout.block_size :] = np.where(rows_of_supers < 0, -1, rows_of_supers + num_nodes)
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
        features = torch.empty(num_microbatches, num_rows, supers.features.shape[1], dtype=torch.float32)
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
        values = (features.flatten(0, 1), degrees.flatten(), node_ids.flatten(), torch.from_numpy(node_index))
        return dict(zip(EMBEDDED, values, strict=True))


def rounded(degrees: np.ndarray) -> np.ndarray:
    """Degrees rounded to int64."""
    return np.rint(degrees).astype(np.int64)
