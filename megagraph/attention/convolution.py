"""A graph convolution of nodes that are spread over ranks: GCN's sum over neighbours (Kipf and Welling, 2017).

A~ is symmetric, so that backward is forward: a rank receives the rows that its own name, of x or of gradients, and
multiplies them by its rows of A~.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megagraph.attention import halo
from megagraph.attention.exchange import Exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.once import differentiable_once

_Multiply = Callable[[Sequence[Tensor]], list[Tensor]]


def convolve(
    exchange: Exchange | None, layouts: list[NodeLayout], neighbours: list[Neighbours], inputs: list[Tensor]
) -> list[Tensor]:
    """A~ x [R, d] of every rank that is here, from their x [R, d] of regular nodes. Collective.

    Args:
        exchange: ``None``: one rank has all nodes.
    """
    if exchange is None:
        return list(_Convolution.apply(partial(_products, neighbours), *inputs))
    regular = [replace(layout, num_super=0) for layout in layouts]
    plans = halo.plan(exchange, regular, [own.relation for own in neighbours])
    going, coming = [plan.going for plan in plans], [plan.coming for plan in plans]
    local = [Neighbours(plan.relation, plan.ordered(own.weights)) for plan, own in zip(plans, neighbours, strict=True)]

    def multiply(xs: Sequence[Tensor]) -> list[Tensor]:
        leaving = [x[plan.rows] for x, plan in zip(xs, plans, strict=True)]
        received = exchange.trade(leaving, going, coming)()
        return _products(local, [torch.cat(both) for both in zip(xs, received, strict=True)])

    return list(_Convolution.apply(multiply, *inputs))


class _Convolution(torch.autograd.Function):
    """What is linear, and symmetric, in the inputs of all ranks."""

    @staticmethod
    def forward(ctx, multiply: _Multiply, *inputs):
        ctx.multiply = multiply
        return tuple(multiply(inputs))

    @staticmethod
    @differentiable_once
    def backward(ctx, *d_outs):
        return None, *ctx.multiply(d_outs)


def _products(neighbours: list[Neighbours], xs: Sequence[Tensor]) -> list[Tensor]:
    return [_product(own, x) for own, x in zip(neighbours, xs, strict=True)]


def _product(own: Neighbours, x: Tensor) -> Tensor:
    """A~ x in the dtype of x; what is shorter than fp32 is added up in it."""
    relation, wide = own.relation, x.to(torch.promote_types(x.dtype, torch.float32))
    if x.device.type == "cpu":
        from megagraph.attention.cpu.neighbours import multiply  # Numba takes a second to import

        return multiply(relation.row_starts, relation.columns, own.weights, wide).to(x.dtype)
    lists, size = (relation.row_starts.int(), relation.columns), (len(relation.row_starts) - 1, relation.num_columns)
    matrix = torch.sparse_csr_tensor(*lists, own.weights.to(wide.dtype), size, check_invariants=False)
    with torch.autocast(x.device.type, enabled=False):
        return (matrix @ wide).to(x.dtype)
