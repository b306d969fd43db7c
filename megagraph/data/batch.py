"""What a batch is: the tensors that the model reads, and the share of them that one rank holds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megagraph.attention.bias import BorderedData
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.data.options import deal

EMBEDDED = ("features", "degrees", "node_ids", "node_index")  # fields of a batch that only the embedding reads
READ_OUT = ("labels", "target_nodes")  # and those that only the loss and the predictions read


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The part of every global batch that one rank builds; the default is all of it.

    The sequences are dealt out over ``dp`` ranks by their ``weights``, as evenly as can be without, and the query rows
    of each over ``cp`` ranks (``NodeLayout``). A rank goes through its sequences in ``num_microbatches`` equal runs.
    One that does not embed, of a later stage of a pipeline, builds no features, most of a batch: its ``EMBEDDED``
    fields have no rows. ``whole_bias``: the bias has all N rows, not just those of the rank.
    """

    dp_rank: int = 0
    dp: int = 1
    weights: tuple[int, ...] = ()
    cp_rank: int = 0
    cp: int = 1
    num_microbatches: int = 1
    embeds: bool = True
    whole_bias: bool = False

    def __post_init__(self) -> None:
        for name, rank, size in (("dp", self.dp_rank, self.dp), ("cp", self.cp_rank, self.cp)):
            if not 0 <= rank < size:
                raise ValueError(f"expected {name}_rank in 0..{name} - 1 = {size - 1}, got {rank}")
        if self.num_microbatches < 1:
            raise ValueError(f"expected num_microbatches >= 1, got {self.num_microbatches}")
        if self.weights and (len(self.weights) != self.dp or min(self.weights) < 1):
            raise ValueError(f"expected dp = {self.dp} weights of at least 1, got {self.weights}")

    def sequences(self, number: int) -> range:
        """Which sequences of a batch of so many the rank has."""
        cuts = deal(number, self.weights or (1,) * self.dp)
        return range(cuts[self.dp_rank], cuts[self.dp_rank + 1])

    def num_sequences(self, number: int) -> int:
        """Sequences that the rank goes through, with those that fill its runs: one each at least."""
        return max(1, -(-len(self.sequences(number)) // self.num_microbatches)) * self.num_microbatches


WHOLE = Share()


def no_rows(in_features: int) -> dict[str, Any]:
    """The fields of a batch that only an embedding reads, for a rank that has none."""
    ids, features = torch.empty(0, dtype=torch.int64), torch.empty(0, in_features, dtype=torch.float32)
    return {"features": features} | {name: ids for name in EMBEDDED if name != "features"}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """One rank's share of B sequences of N slots: N' regular nodes, then N_s super nodes, the last G global tokens.

    The rank has b of them, and the S query rows of ``layout`` of each; empty sequences, with padding for all regular
    nodes, fill its part up to a multiple of K. Of the first T regular slots, which are read out, t are among its rows.
    Each of its K micro-batches has its own table of U distinct rows of features, a shorter one ending in zeros;
    ``torch.chunk(tensor, K)`` of every tensor gives the micro-batches. Shapes:
        features:         [K * U, d_in]     float32  raw features of the nodes and super nodes in local slots
        degrees:          [K * U]           int64    of these rows; a super node has the mean degree of its members
        node_ids:         [K * U]           int64    of these rows: 0..V-1, super nodes from V on; -1 = not read
        node_index:       [b, S - G]        int64    row of the table, global tokens have none; 0 on padding
        structure:        [b, C + G, S, N]  float32  or bfloat16, channels of ``ProjectedBias``, or
                          [b, S, N]         uint8    buckets of ``BucketBias``, or ``BorderedData`` of a full batch;
                          all N rows        where the share says so
        key_padding_mask: [b, N]            bool     True = padding
        labels:           [b, t]            int64    class, -1 = does not count; or, of several labels a node,
                          [b, t, classes]   int8     1 = has it, 0 = has it not
        target_nodes:     [b, t]            int64    node id, -1 = padding
        sequence_ids:     [b]               int64    position in the global batch, B of an empty one

    ``neighbours``, of a full batch whose layers have a convolution, are those of the rank's regular nodes.
    ``num_targets`` is the number of labels that count in the global batch, on all ranks together.
    """

    features: Tensor
    degrees: Tensor
    node_ids: Tensor
    node_index: Tensor
    structure: Tensor | BorderedData
    key_padding_mask: Tensor
    labels: Tensor
    target_nodes: Tensor
    sequence_ids: Tensor
    layout: NodeLayout
    num_targets: int
    neighbours: Neighbours | None

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
            "neighbours": self.neighbours,
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
        moved = self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking), leave)
        if isinstance(self.structure, BorderedData):
            moved = replace(moved, structure=self.structure.to(device, non_blocking=non_blocking))
        if self.neighbours is not None:
            moved = replace(moved, neighbours=self.neighbours.to(device, non_blocking=non_blocking))
        return moved

    def pin_memory(self) -> Batch:
        return self.map(Tensor.pin_memory)

    def without_features(self) -> Batch:
        """What a rank that does not embed has of the batch."""
        return replace(self, **no_rows(self.features.shape[1]))

    def memory(self) -> list[Tensor]:
        """Every tensor, those of ``BorderedData`` and neighbours among them; of a dense structure all of its memory."""
        found: list[Tensor] = []
        for field in fields(self):
            x = getattr(self, field.name)
            if isinstance(x, BorderedData | Neighbours):
                found += x.tensors
            elif isinstance(x, Tensor):
                found.append(_whole_rows(x) if field.name == "structure" else x)
        return found

    def map(self, function: Callable[[Tensor], Tensor], leave: Collection[str] = ()) -> Batch:
        """The batch with other tensors, but for the fields to ``leave``; ``BorderedData`` and neighbours stay."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name not in leave)
        mapped: dict[str, Any] = {
            name: function(value) for name, value in values if isinstance(value, Tensor) and name != "structure"
        }
        if isinstance(self.structure, BorderedData):
            return replace(self, **mapped)
        # with the memory between its rows: they stay aligned, and it is one copy
        mapped["structure"] = function(_whole_rows(self.structure))[..., : self.structure.shape[-1]]
        return replace(self, **mapped)


def _whole_rows(structure: Tensor) -> Tensor:
    """Rows as long as they are apart in memory."""
    return structure.as_strided((*structure.shape[:-1], structure.stride(-2)), structure.stride())
