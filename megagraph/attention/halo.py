"""A halo: a rank receives just the keys and values that its pairs name, and sends their gradients home.

    columns of a rank    0 ... R-1 | R ... S-1 | S ... S+h-1
                         own block | super     | named by its pairs, by rank

    forward     rows leave and arrive in one message to each rank, while the rank attends to what is at home
    backward    the gradients of rows that came leave first, and travel while those of rows at home are computed

What came is kept for backward. A rank receives 2 * h * d elements forward, and sends as many gradients backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megagraph.attention.exchange import Exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.rank import Rank, fold, fold_back, wait
from megagraph.attention.relation import Relation
from megagraph.attention.step import Gradients, Segments, State, Step


@dataclass(frozen=True, eq=False)
class Halo:
    """What one rank receives and sends, and its pairs in its own columns.

    Args:
        relation: of the M rows and the S + h columns.
        pairs: int64 [P], which pair of the rank's relation each of these is.
        column_ids: int32 [S + h], the global column of each.
        coming: rows that come from each rank, h in all.
        going: rows that go to each rank, g in all.
        rows: int64 [g], which of the rows here they are, by rank.
    """

    relation: Relation
    pairs: Tensor
    column_ids: Tensor
    coming: list[int]
    going: list[int]
    rows: Tensor
    _ordered: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)  # of data: (version, data)

    @property
    def segments(self) -> Segments:
        """Where the keys that come stand: one segment, behind the columns of the rank's own."""
        num_halo = sum(self.coming)
        return [(0, self.relation.num_columns - num_halo, num_halo)]

    def ordered(self, data: Tensor) -> Tensor:
        """Data [P, ...] of the rank's pairs, as these follow here; kept until it changes."""
        if data.is_inference():  # has no version
            return data[self.pairs]
        version, ordered = self._ordered.get(data, (-1, data))
        if version != data._version:
            with torch.inference_mode(False):  # training takes it, too
                ordered = data[self.pairs]
            self._ordered[data] = (data._version, ordered)
        return ordered

    def step(self, step: Step) -> Step:
        """A step in the rank's own columns; a dense learned part is left as it is."""
        data, padding = step.data, step.key_padding_mask
        if data is not None:
            data = self.ordered(data)
        if padding is not None:
            padding = padding[:, self.column_ids.long().clamp(max=padding.shape[1] - 1)]
        return step.but(data=data, key_padding_mask=padding, column_ids=self.column_ids, **self.relation.lists)


_plans: WeakKeyDictionary[Relation, dict[NodeLayout, Halo]] = WeakKeyDictionary()


@torch.inference_mode(False)  # training takes what evaluation has made
def plan(exchange: Exchange, layouts: list[NodeLayout], relations: list[Relation]) -> list[Halo]:
    """The halo of every rank that is here, made where its relation comes for the first time; collective then."""
    keys = list(zip(layouts, relations, strict=True))
    if all(layout in _plans.get(relation, {}) for layout, relation in keys):
        return [_plans[relation][layout] for layout, relation in keys]
    named, coming = [], []
    for layout, relation in keys:
        starts = torch.tensor(
            [layout.block(rank).start for rank in range(layout.world_size)] + [layout.num_nodes], device="cpu"
        )
        named.append(_named(layout, relation))
        coming.append(torch.searchsorted(named[-1], starts).diff())
    devices = [relation.columns.device for relation in relations]
    once = [[1] * layouts[0].world_size] * len(layouts)
    going = exchange.trade([x.to(device) for x, device in zip(coming, devices, strict=True)], once, once)()
    counts, sent = [x.tolist() for x in coming], [x.tolist() for x in going]
    asked = exchange.trade([x.to(device) for x, device in zip(named, devices, strict=True)], counts, sent)()
    halos = []
    for (layout, relation), ids, of_ranks, to_ranks, nodes in zip(keys, named, counts, sent, asked, strict=True):
        halo = _halo(layout, relation, ids, of_ranks, to_ranks, nodes - layout.block().start)
        _plans.setdefault(relation, {})[layout] = halo
        halos.append(halo)
    return halos


def _named(layout: NodeLayout, relation: Relation) -> Tensor:
    """int64 [h], the regular nodes of other ranks that pairs name, ascending."""
    away = torch.zeros(relation.num_columns, dtype=torch.bool, device="cpu")
    away[relation.columns.long().cpu()] = True
    block = layout.block()
    away[block.start : block.stop] = False
    away[layout.num_nodes :] = False
    return away.nonzero()[:, 0]


def _halo(
    layout: NodeLayout, relation: Relation, named: Tensor, coming: list[int], going: list[int], rows: Tensor
) -> Halo:
    device = relation.columns.device
    column_ids = torch.cat([layout.row_ids(torch.device("cpu")), named])
    local = torch.empty(relation.num_columns, dtype=torch.int64, device="cpu")
    own, num_own, supers = layout.block(), len(layout.block()), relation.num_columns - layout.num_nodes
    local[named] = layout.num_local + torch.arange(len(named), device="cpu")
    local[own.start : own.stop] = torch.arange(num_own, device="cpu")
    local[layout.num_nodes :] = layout.block_size + torch.arange(supers, device="cpu")
    columns = local[relation.columns.long().cpu()]
    pairs = (relation.rows() * len(column_ids) + columns).argsort()  # by row, as before, and by the new column
    sequences, starts = relation.shape[0], relation.row_starts.cpu()
    ordered = Relation.of_rows(starts, columns[pairs].int(), len(column_ids), sequences)
    return Halo(ordered.to(device), pairs.to(device), column_ids.int().to(device), coming, going, rows)


@dataclass(frozen=True)
class HaloWay:
    """The way of keys and values in ``rank.RankAttention``."""

    exchange: Exchange
    halos: list[Halo]

    def forward(self, ranks: list[Rank]) -> tuple[list[State], list[Tensor]]:
        going, coming = [halo.going for halo in self.halos], [halo.coming for halo in self.halos]
        messages = [_message(rank, halo) for rank, halo in zip(ranks, self.halos, strict=True)]
        arriving, states = self.exchange.trade(messages, going, coming), [rank.state() for rank in ranks]
        for rank, state in zip(ranks, states, strict=True):
            fold(rank, rank.steps, rank.k, rank.v, state, first=True, last=False)
        received = wait(arriving)
        for rank, halo, state, rows in zip(ranks, self.halos, states, received, strict=True):
            k, v = rows.movedim(0, 3)
            fold(rank, rank.visited(halo.segments), k, v, state, first=False, last=True)
        return states, received

    def backward(self, ranks: list[Rank], own: list[Gradients], kept: tuple[Tensor, ...]) -> None:
        going, coming = [halo.going for halo in self.halos], [halo.coming for halo in self.halos]
        gradients = [torch.zeros_like(rows, dtype=sums.dk.dtype) for rows, sums in zip(kept, own, strict=True)]
        for rank, halo, sums, rows, d_rows in zip(ranks, self.halos, own, kept, gradients, strict=True):
            (k, v), (dk, dv) = rows.movedim(0, 3), d_rows.movedim(0, 3)
            fold_back(rank, rank.visited(halo.segments), k, v, sums.but(dk=dk, dv=dv))
        arriving = self.exchange.trade(gradients, coming, going)
        for rank, sums in zip(ranks, own, strict=True):
            fold_back(rank, rank.steps, rank.k, rank.v, sums)
        for halo, sums, home in zip(self.halos, own, wait(arriving), strict=True):
            parts = (x.split(halo.going) for x in (halo.rows, home))
            for rows, part in zip(*parts, strict=True):  # a row at most once of each rank: no order to be lost
                dk, dv = part.movedim(0, 3)
                sums.dk.index_add_(2, rows, dk)
                sums.dv.index_add_(2, rows, dv)


def _message(rank: Rank, halo: Halo) -> Tensor:
    """[n, 2, B, H, D], the rows of k and v that go, by rank."""
    return torch.stack([x.movedim(2, 0)[halo.rows] for x in (rank.k, rank.v)], dim=1)
