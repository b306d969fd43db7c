"""Heads dealt out: a rank attends with H / P of them from all rows to all keys (arXiv:2309.14509, arXiv:2407.14106).

    rows of a rank, all heads  --all-to-all-->  all rows, heads of a rank  --all-to-all-->  rows of a rank, all heads

    forward     q, k and v of regular rows go to the ranks of their heads; results come back, those of super rows to all
    backward    the gradients of results go the same way, those of super rows as a sum; then those of q, k and v go home

Super nodes are on every rank, so that a rank has its heads of them: q, k and v of these never travel, and the share of
their gradients that a rank gets is that of its heads. In between stands what one rank with all nodes computes, which
needs the bias of all rows. A rank sends (P - 1) / P * (4 R + N_s) * d elements forward, and as many backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from megagraph.attention.bias import Bias, BorderedBias, DenseBias, ProjectedBias
from megagraph.attention.exchange import Exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.once import differentiable_once
from megagraph.attention.rank import wait

Three = tuple[Tensor, Tensor, Tensor]


def own_heads(layout: NodeLayout, each: int) -> slice:
    """The heads of this rank, where every rank has ``each`` of them."""
    return slice(layout.rank * each, (layout.rank + 1) * each)


def bias_of_heads(bias: Bias | None, heads: slice) -> Bias | None:
    """The bias of some heads: its learned part cut by them, which the data do not have; differentiable."""
    if bias is None:
        return None
    if isinstance(bias, BorderedBias):
        parts = {name: bias_of_heads(part, heads) for name, part in vars(bias).items()}
        return BorderedBias(**parts)  # type: ignore[arg-type]
    if isinstance(bias, DenseBias):
        return bias if bias.shape[1] == 1 else replace(bias, values=bias.values[:, heads])
    if isinstance(bias, ProjectedBias):
        return replace(bias, weight=bias.weight[heads])
    return replace(bias, table=bias.table[heads])


def to_heads(exchange: Exchange, layouts: list[NodeLayout], rows: list[Three]) -> list[Three]:
    """q, k and v of every rank that is here, [B, H, S, D] of its rows -> [B, H / P, N, D] of its heads."""
    flat = _ToHeads.apply(exchange, layouts, *chain.from_iterable(rows))
    return list(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))


def to_rows(exchange: Exchange, layouts: list[NodeLayout], results: list[Tensor]) -> Sequence[Tensor]:
    """A result of every rank that is here, [B, H / P, N, X] for its heads -> [B, H, S, X] of its rows."""
    return _ToRows.apply(exchange, layouts, *results)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, layouts, *inputs):
        ctx.exchange, ctx.layouts, whole = exchange, layouts, []
        of_ranks = list(zip(inputs[0::3], inputs[1::3], inputs[2::3], strict=True))
        regular = [
            [x[:, :, : len(layout.block())] for x in three] for layout, three in zip(layouts, of_ranks, strict=True)
        ]
        received = _send_heads(exchange, regular, _lengths(layouts[0]))
        for layout, three, parts in zip(layouts, of_ranks, received, strict=True):
            for x, part in zip(three, parts.chunk(3, dim=3), strict=True):
                supers = x[:, own_heads(layout, part.shape[1]), layout.block_size :]
                whole.append(torch.cat([part, supers], dim=2))
        return tuple(whole)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        of_ranks = list(zip(grads[0::3], grads[1::3], grads[2::3], strict=True))
        layouts, gradients, num_nodes = ctx.layouts, [], ctx.layouts[0].num_nodes
        messages = [torch.cat([x[:, :, :num_nodes].movedim(2, 0) for x in three], dim=3) for three in of_ranks]
        home = _send_rows(ctx.exchange, messages, _lengths(layouts[0]), [len(layout.block()) for layout in layouts])
        for layout, three, parts in zip(layouts, of_ranks, home, strict=True):
            for x, part in zip(three, parts.chunk(3, dim=3), strict=True):
                B, H, n, D = part.shape
                gradient = x.new_zeros(B, layout.num_local, H, D).transpose(1, 2)
                gradient[:, :, :n] = part
                gradient[:, own_heads(layout, x.shape[1]), layout.block_size :] = x[:, :, num_nodes:]
                gradients.append(gradient)
        return None, None, *gradients


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange, layouts, *inputs):
        ctx.exchange, ctx.layouts = exchange, layouts
        first, lengths = layouts[0], _lengths(layouts[0], supers=True)
        blocks = [slice(block.start, block.stop) for block in map(first.block, range(first.world_size))]
        supers = slice(first.num_nodes, None)
        messages = [torch.cat([x.movedim(2, 0)[rows] for block in blocks for rows in (block, supers)]) for x in inputs]
        received = _send_rows(exchange, messages, lengths, [lengths[layout.rank] for layout in layouts])
        return tuple(_with_padding(layout, x) for layout, x in zip(layouts, received, strict=True))

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        layouts, gradients = ctx.layouts, []
        num_super, lengths = layouts[0].num_super, _lengths(layouts[0], supers=True)
        rows = [[_without_padding(layout, x)] for layout, x in zip(layouts, grads, strict=True)]
        for received in _send_heads(ctx.exchange, rows, lengths):
            parts = received.split(lengths, dim=2)
            regular = [part[:, :, : part.shape[2] - num_super] for part in parts]
            shares = torch.stack([part[:, :, part.shape[2] - num_super :] for part in parts])
            gradients.append(torch.cat([*regular, shares.sum(dim=0)], dim=2))
        return None, None, *gradients


def _lengths(layout: NodeLayout, *, supers: bool = False) -> list[int]:
    """Rows of every rank that are nodes."""
    return [len(layout.block(rank)) + supers * layout.num_super for rank in range(layout.world_size)]


def _send_heads(exchange: Exchange, rows: Sequence[Sequence[Tensor]], lengths: list[int]) -> list[Tensor]:
    """Rows of every rank here, [B, H, n, D] each -> its heads of those of all, [B, H / P, sum of lengths, sum of D]."""
    ranks = len(lengths)
    messages = [torch.cat([_by_rank(x, ranks) for x in of_rank], dim=4).flatten(0, 1).contiguous() for of_rank in rows]
    counts = [[of_rank[0].shape[2]] * ranks for of_rank in rows]
    received = wait(exchange.trade(messages, counts, [lengths] * len(messages)))
    return [x.movedim(0, 2) for x in received]


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """[B, H, n, D] -> [P, n, B, H / P, D], by the rank of the heads."""
    return x.unflatten(1, (ranks, -1)).permute(1, 3, 0, 2, 4)


def _send_rows(exchange: Exchange, messages: list[Tensor], lengths: list[int], own: list[int]) -> list[Tensor]:
    """The way back: [sum of lengths, B, H / P, D] -> [B, H, n, D], in memory row by row, too."""
    ranks = len(lengths)
    sent = [x.contiguous() for x in messages]
    received = wait(exchange.trade(sent, [lengths] * len(sent), [[n] * ranks for n in own]))
    by_rank = (x.unflatten(0, (ranks, n)).permute(2, 1, 0, 3, 4) for x, n in zip(received, own, strict=True))
    return [x.flatten(2, 3).transpose(1, 2) for x in by_rank]


def _with_padding(layout: NodeLayout, x: Tensor) -> Tensor:
    """All S rows [B, H, S, X] from those that are nodes."""
    missing = layout.num_local - x.shape[2]
    if not missing:
        return x
    regular, supers = x.split([len(layout.block()), layout.num_super], dim=2)
    return torch.cat([regular, x.new_zeros(*x.shape[:2], missing, x.shape[3]), supers], dim=2)


def _without_padding(layout: NodeLayout, x: Tensor) -> Tensor:
    """The rows of [B, H, S, X] that are nodes."""
    num = len(layout.block())
    return x if num == layout.block_size else torch.cat([x[:, :, :num], x[:, :, layout.block_size :]], dim=2)
