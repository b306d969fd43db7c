"""A whole graph as one sequence: listed pairs of regular nodes, and super nodes that see, and are seen by, all.

    columns     0 ........... N'-1 | N' ... N-1
    regular     listed pairs       | dense          steps of one softmax, each from where the one before has ended
    super       dense                               each rank's own keys, then the softmaxes of the ranks become one

Nothing of N x N exists: data is kept for the pairs, and for N_s rows and N_s columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megagraph.attention.bias import BorderedBias, BucketBias
from megagraph.attention.comm import attend
from megagraph.attention.engines import state_dtype
from megagraph.attention.exchange import Exchange
from megagraph.attention.layout import NodeLayout
from megagraph.attention.once import differentiable_once
from megagraph.attention.rank import Home, RankAttention
from megagraph.attention.step import Step
from megagraph.attention.ways import Comm

MakeStep = Callable[[Tensor, BucketBias, Tensor | None], Step]  # of q, bias and padding of its columns


def bordered_attention(
    comm: Comm,
    exchange: Exchange | None,
    layouts: list[NodeLayout],
    make: MakeStep,
    inputs: list[tuple[Tensor, Tensor, Tensor, BorderedBias]],
    key_padding_mask: Tensor | None,
) -> list[Tensor]:
    """out [B, H, M, D] and lse [B, H, M] of every rank that is here, of checked arguments.

    Args:
        exchange: ``None``: one rank has all nodes.
        inputs: q, k, v and the bias of each rank; all ask for the super rows, or none does.
    """
    steps, flat = [], []
    for layout, (q, k, v, bias) in zip(layouts, inputs, strict=True):
        regular, num_nodes = q[:, :, : layout.block_size], layout.num_nodes
        border = make(regular, bias.super_columns, _columns(key_padding_mask, num_nodes, layout.num_columns))
        pairs = make(regular, bias.pairs, _columns(key_padding_mask, 0, num_nodes))
        steps.append((border.but(first_column=num_nodes), pairs))
        flat += [regular, k, v, bias.learned]
    results = attend(comm, exchange, layouts, steps, [bias.relation for *_, bias in inputs], flat)
    if inputs[0][3].super_rows is None:
        return list(results)
    of_supers = _super_rows(exchange, layouts, make, inputs, key_padding_mask)
    return [torch.cat(both, dim=2) for both in zip(results, of_supers, strict=True)]


def _super_rows(
    exchange: Exchange | None,
    layouts: list[NodeLayout],
    make: MakeStep,
    inputs: list[tuple[Tensor, Tensor, Tensor, BorderedBias]],
    key_padding_mask: Tensor | None,
) -> list[Tensor]:
    """out and lse of the super nodes, equal on all ranks; every rank attends to its own keys, rank 0 to theirs, too."""
    steps, flat = [], []
    for layout, (q, k, v, bias) in zip(layouts, inputs, strict=True):
        supers, block, R = q[:, :, layout.block_size :], layout.block(), layout.block_size
        assert bias.super_rows is not None
        index, table = bias.super_rows.index, bias.learned
        parts = [(0, block.start, BucketBias(index[:, :, : len(block)], table))]
        if layout.rank == 0:
            parts.insert(0, (R, layout.num_nodes, BucketBias(index[:, :, R:], table)))
        rows = torch.arange(layout.num_nodes, layout.num_columns, dtype=torch.int32, device=q.device)
        of_rank = []
        for first_key, first_column, part in parts:
            length = part.index.shape[2]
            step = make(supers, part, _columns(key_padding_mask, first_column, first_column + length))
            step = step.but(segments=[(first_key, 0, length)], first_column=first_column)
            of_rank.append(step if step.dropout_key is None else step.but(row_ids=rows))
        steps.append(tuple(of_rank))
        flat += [supers, k, v, bias.learned]
    results = RankAttention.apply(Home(), layouts, steps, *flat)
    return list(results if exchange is None else _OneSoftmax.apply(exchange, *results))


def _columns(padding: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if padding is None else padding[:, first:last]


class _OneSoftmax(torch.autograd.Function):
    """out [B, H, M, D] and lse [B, H, M] of every rank here, over its own keys -> over the keys of all.

    What a rank gets of gradients is its share of them, as the rows are on all ranks.
    """

    @staticmethod
    def forward(ctx, exchange, *inputs):
        ctx.exchange, results, weights = exchange, [], []
        for out, (outs, lses) in zip(inputs[0::2], _gathered(exchange, inputs), strict=True):
            lse = lses.logsumexp(0)
            share = (lses - lse).exp().nan_to_num(0.0)  # of no keys at all: 0
            results += [(share[..., None] * outs).sum(0).to(out.dtype), lse]
        for own, lse in zip(inputs[1::2], results[1::2], strict=True):
            weights.append((own - lse).exp().nan_to_num(0.0))
        ctx.save_for_backward(*inputs[0::2], *weights, *results[0::2])
        return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx, *grads):
        num_ranks, saved, gradients = len(grads) // 2, ctx.saved_tensors, []
        for i, (d_outs, d_lses) in enumerate(_gathered(ctx.exchange, grads)):
            own, weight, out = saved[i], saved[num_ranks + i], saved[2 * num_ranks + i]
            d_out, d_lse = d_outs.sum(0), d_lses.sum(0)
            d_own_lse = weight * (d_lse + (d_out * (own - out)).sum(-1))
            gradients += [(weight[..., None] * d_out).to(own.dtype), d_own_lse]
        return None, *gradients


def _gathered(exchange: Exchange, tensors: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
    """[P, ...] of both tensors of every rank here, [B, H, M, D] and [B, H, M]; in the dtype of sums."""
    messages = [
        torch.cat([x.to(state_dtype(x)), y[..., None].to(state_dtype(x))], dim=3)
        for x, y in zip(tensors[0::2], tensors[1::2], strict=True)
    ]
    return [(x[..., :-1], x[..., -1]) for x in exchange.gather(messages)]
