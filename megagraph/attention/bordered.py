"""A whole graph as one sequence: listed pairs of regular nodes, and super nodes that see, and are seen by, all.

    columns     0 ........... N'-1 | N' ... N-1
    regular     listed pairs       | dense          two steps of one softmax, the second from where the first has ended
    super       dense                               all keys in one step

Nothing of N x N exists: data is kept for the pairs, and for N_s rows and N_s columns.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megagraph.attention.bias import BorderedBias, BucketBias
from megagraph.attention.engines import ENGINES, state_dtype
from megagraph.attention.operator import attention_step_, attention_step_backward_, learned_gradient, make_step
from megagraph.attention.step import Gradients, State, Step


def bordered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: BorderedBias,
    key_padding_mask: Tensor | None,
    scale: float | None,
    dropout_p: float,
    dropout_key: Tensor | None,
    engine: str,
) -> tuple[Tensor, Tensor]:
    """out [B, H, M, D] and lse [B, H, M] of checked arguments; differentiable in q, k, v and the learned part."""
    num_nodes, num_keys = bias.super_columns.shape[2], k.shape[2]

    def step(part: BucketBias, first_key: int, last_key: int) -> Step:
        padding = None if key_padding_mask is None else key_padding_mask[:, first_key:last_key]
        made = make_step(q, part, padding, scale, dropout_p, dropout_key, engine, False)
        return made.but(segments=[(first_key, 0, last_key - first_key)], first_column=first_key)

    steps = [step(bias.super_columns, num_nodes, num_keys), step(bias.pairs, 0, num_nodes)]
    if bias.super_rows is not None:
        rows = torch.arange(num_nodes, num_keys, dtype=torch.int32, device=q.device)
        steps.append(step(bias.super_rows, 0, num_keys).but(row_ids=None if dropout_key is None else rows))
    return _BorderedAttention.apply(steps, q, k, v, bias.learned)


class _BorderedAttention(torch.autograd.Function):
    """Steps of the regular rows: super columns, then pairs; and maybe one of the super rows."""

    @staticmethod
    def forward(ctx, steps, q, k, v, learned):
        ctx.steps = [step.but(learned=None) for step in steps]
        out, dtype = torch.empty_like(q), state_dtype(q)
        lses = []
        for rows, group in _groups(ctx, q.shape[2], learned):
            of_rows, size = q[:, :, rows], (*q.shape[:2], rows.stop - rows.start)
            m, l, lse = (q.new_empty(size, dtype=dtype) for _ in range(3))
            acc = q.new_empty((*size, q.shape[3]) if len(group) > 1 else 0, dtype=dtype)
            state = State(first=False, last=False, m=m, l=l, acc=acc, out=out[:, :, rows], lse=lse)
            for i, step in enumerate(group):
                now = state.at(first=i == 0, last=i == len(group) - 1)
                attention_step_(of_rows, k, v, *step.flat(), *now.flat())
            lses.append(lse)
        ctx.save_for_backward(q, k, v, learned, out, *lses)
        return out, torch.cat(lses, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_lse):
        q, k, v, learned, out, *lses = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x, dtype=state_dtype(q)) for x in (q, k, v))
        d_learned = learned_gradient(ctx.steps[0], q, learned) if ctx.needs_input_grad[4] else None
        for (rows, group), lse in zip(_groups(ctx, q.shape[2], learned), lses, strict=True):
            delta = ENGINES[group[0].engine].delta(group[0], d_out[:, :, rows], out[:, :, rows], d_lse[:, :, rows])
            gradients = Gradients(
                d_out=d_out[:, :, rows],
                lse=lse,
                delta=delta,
                dq=dq[:, :, rows],
                dk=dk,
                dv=dv,
                d_learned=d_learned,
                accumulate=True,
            )
            for step in group:
                attention_step_backward_(q[:, :, rows], k, v, *step.flat(), *gradients.flat())
        given = [x.to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v))]
        return None, *given, None if d_learned is None else d_learned.to(learned.dtype)


def _groups(ctx, num_rows: int, learned: Tensor) -> list[tuple[slice, list[Step]]]:
    """Rows, and the steps of their softmax."""
    num_nodes = ctx.steps[1].segments[0][2]
    steps = [step.but(learned=learned) for step in ctx.steps]
    regular = (slice(0, num_nodes), steps[:2])
    return [regular] if len(steps) == 2 else [regular, (slice(num_nodes, num_rows), steps[2:])]
