"""How keys and values of all ranks get to a rank's queries by one of the ``ways``, but for ``"ulysses"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from megagraph.attention.exchange import Exchange
from megagraph.attention.halo import Halo, HaloWay, plan
from megagraph.attention.layout import NodeLayout
from megagraph.attention.once import differentiable_once
from megagraph.attention.operator import attention
from megagraph.attention.rank import Home, RankAttention
from megagraph.attention.relation import Relation
from megagraph.attention.ring import Ring
from megagraph.attention.step import Step
from megagraph.attention.ways import Comm


def attend(
    comm: Comm,
    exchange: Exchange | None,
    layouts: list[NodeLayout],
    steps: Sequence[tuple[Step, ...]],
    relations: Sequence[Relation | None],
    inputs: list[Any],
) -> Sequence[Tensor]:
    """out and lse of every rank that is here.

    Args:
        exchange: ``None`` where one rank has all keys.
        steps: of each rank, without segments and rows: maybe one against the super nodes alone, then one against all
            other keys.
        relations: of the last step's pairs, where it has lists.
        inputs: q, k, v and the learned part of the bias, or None, of each rank.
    """
    if exchange is None:
        return RankAttention.apply(Home(), layouts, _placed(layouts, steps), *inputs)
    of_ranks = zip(steps, layouts, inputs[0::4], strict=True)
    steps = [_with_rows(of_rank, layout, q) for of_rank, layout, q in of_ranks]
    if comm == "ring":
        return RankAttention.apply(Ring(exchange), layouts, _placed(layouts, steps), *inputs)
    if comm == "halo":
        halos = plan(exchange, layouts, [x for x in relations if x is not None])
        inputs, steps = _with_halos(halos, layouts, steps, inputs)
        return RankAttention.apply(HaloWay(exchange, halos), layouts, steps, *inputs)
    q, k, v = inputs[0::4], inputs[1::4], inputs[2::4]
    gathered = _Gather.apply(exchange, layouts, *(x for pair in zip(k, v, strict=True) for x in pair))
    if len(steps[0]) > 1:
        inputs = [x for four in zip(q, gathered[0::2], gathered[1::2], inputs[3::4], strict=True) for x in four]
        layouts = [NodeLayout(layout.num_nodes, layout.num_super) for layout in layouts]
        return RankAttention.apply(Home(), layouts, _placed(layouts, steps), *inputs)
    results: list[Tensor] = []
    for (step,), rows, keys, values in zip(steps, q, gathered[0::2], gathered[1::2], strict=True):
        with record_function("ring step"):
            results += attention(step, rows, keys, values, None)
    return results


def _with_rows(steps: tuple[Step, ...], layout: NodeLayout, q: Tensor) -> tuple[Step, ...]:
    """The steps with the global rows of q, which dropout needs."""
    if steps[-1].dropout_key is None:
        return steps
    rows = layout.row_ids(q.device)[: q.shape[2]].int()
    return tuple(step.but(row_ids=rows) for step in steps)


def _placed(layouts: list[NodeLayout], steps: Sequence[tuple[Step, ...]]) -> list[tuple[Step, ...]]:
    """The steps against a rank's own rows, with the columns in which these stand."""
    placed = []
    for layout, (*borders, step) in zip(layouts, steps, strict=True):
        own = layout.segments(layout.rank)
        supers = (step.but(segments=[(layout.block_size, 0, layout.num_super)]) for step in borders)
        placed.append((*supers, step.but(segments=own[:1] if borders else own)))
    return placed


def _with_halos(
    halos: list[Halo], layouts: list[NodeLayout], steps: Sequence[tuple[Step, ...]], inputs: list[Any]
) -> tuple[list[Any], list[tuple[Step, ...]]]:
    """The inputs and steps with the pairs in the order and the columns of the halos."""
    placed, inputs = _placed(layouts, steps), list(inputs)
    for i, (halo, layout) in enumerate(zip(halos, layouts, strict=True)):
        *borders, step = placed[i]
        if step.form == "dense":
            inputs[4 * i + 3] = inputs[4 * i + 3][halo.pairs]
        placed[i] = (*borders, halo.step(step).but(segments=[(0, 0, layout.num_local)]))
    return inputs, placed


class _Gather(torch.autograd.Function):
    """k and v [B, H, S, D] of every rank here -> those of all nodes [B, H, N, D], its own super rows among them."""

    @staticmethod
    def forward(ctx, exchange, layouts, *inputs):
        ctx.exchange, ctx.layouts = exchange, layouts
        rows = [torch.stack(pair) for pair in zip(inputs[0::2], inputs[1::2], strict=True)]  # [2, B, H, S, D]
        with record_function("exchange wait"):
            gathered = exchange.gather([layout.padded(x, 3) for layout, x in zip(layouts, rows, strict=True)])
        whole = (
            layout.join(blocks.unbind(), x[:, :, :, layout.block_size :], dim=3)
            for layout, blocks, x in zip(layouts, gathered, rows, strict=True)
        )
        return tuple(x for pair in whole for x in pair)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        sums = [torch.stack(pair) for pair in zip(grads[0::2], grads[1::2], strict=True)]  # [2, B, H, N, D]
        with record_function("exchange wait"):
            home = ctx.exchange.sum_home([_blocks(layout, x) for layout, x in zip(ctx.layouts, sums, strict=True)])
        whole = (
            torch.cat([own[:, :, :, : layout.block_size], x[:, :, :, layout.num_nodes :]], dim=3)
            for layout, own, x in zip(ctx.layouts, home, sums, strict=True)
        )
        return None, None, *(x for pair in whole for x in pair)


def _blocks(layout: NodeLayout, x: Tensor) -> Tensor:
    """The regular rows of [2, B, H, N, D] by rank, [P, 2, B, H, R, D] with those of the largest block."""
    blocks = (layout.block(rank) for rank in range(layout.world_size))
    parts = [x[:, :, :, block.start : block.stop] for block in blocks]
    size = layout.largest_block
    return torch.stack([nn.functional.pad(part, (0, 0, 0, size - part.shape[3])) for part in parts])
