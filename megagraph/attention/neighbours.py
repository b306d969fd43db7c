"""Who is whose neighbour, and with what weight: the rows of a normalised adjacency."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from megagraph.attention.layout import NodeLayout
from megagraph.attention.relation import Relation, numbered


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Rows of A~ = D^-1/2 (A + I) D^-1/2, which is symmetric, of the R regular nodes that are here.

    Args:
        relation: which entries there are, of R rows and N' columns.
        weights: float32 [P], of each.
    """

    relation: Relation
    weights: Tensor
    _moved: dict[torch.device, Neighbours] = field(default_factory=dict, init=False, repr=False)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weights, *self.relation.lists.values()]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Neighbours:
        """The rows on ``device``; kept, as those of ``BorderedData`` are."""
        device = numbered(device)
        if device == self.weights.device:
            return self
        if device not in self._moved:
            weights = self.weights.to(device, non_blocking=non_blocking)
            self._moved[device] = Neighbours(self.relation.to(device), weights)
        return self._moved[device]

    def shard(self, layout: NodeLayout) -> Neighbours:
        """What one rank holds of the rows of all nodes."""
        if layout.world_size == 1:
            return self
        relation, entries = self.relation.take(layout.local_to_global[: layout.block_size])
        return Neighbours(relation, self.weights[entries])
