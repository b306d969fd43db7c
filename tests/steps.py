"""Attention step by step, as a ring takes it, by the kernels or on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megagraph.attention.operator import attention_step_, attention_step_backward_, learned_gradient
from megagraph.attention.step import Gradients, State, Step
from tests.problems import DEVICE, Problem


def one_step(N):
    return [(torch.arange(N, device=DEVICE), [(0, 0, N)])]


def _room(x: Tensor, dtype: torch.dtype, accumulate: bool) -> Tensor:
    """To be added to, or else written."""
    return torch.zeros_like(x, dtype=dtype) if accumulate else torch.full_like(x, torch.nan)


def run_steps(
    problem: Problem, steps=None, row_ids=None, learned_grad=True, name="triton", tf32=False
) -> dict[str, Tensor]:
    """out, lse and gradients; steps: (global columns of the visiting keys, segments) each."""
    q, k, v, bias = problem.q, problem.k, problem.v, problem.bias
    D = q.shape[3]
    dtype = torch.promote_types(q.dtype, torch.float32)
    steps = steps or one_step(k.shape[2])
    step = Step(
        engine=name,
        short=False,
        form="none" if bias is None else bias.form,
        data=None if bias is None else bias.data,
        learned=None if bias is None else bias.learned,
        bias_mask=None if bias is None else bias.mask,
        key_padding_mask=problem.padding,
        segments=[],
        scale=D**-0.5,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        row_ids=row_ids,
        tf32=tf32,
        **({} if bias is None or bias.relation is None else bias.relation.lists),
    )
    out, (m, l, lse) = torch.empty_like(q), (torch.empty(q.shape[:3], dtype=dtype, device=DEVICE) for _ in range(3))
    acc = torch.empty(q.shape, dtype=dtype, device=DEVICE)
    state = State(first=False, last=False, m=m, l=l, acc=acc, out=out, lse=lse)
    for i, (columns, segments) in enumerate(steps):
        kv = (x if len(steps) == 1 else x[:, :, columns] for x in (k, v))
        now = state.at(first=i == 0, last=i == len(steps) - 1)
        attention_step_(q, *kv, *replace(step, segments=segments).flat(), *now.flat())

    accumulate = len(steps) > 1
    dq, dk, dv = (_room(x, dtype, accumulate) for x in (q, k, v))
    d_learned = None
    if learned_grad and bias is not None:
        d_learned = learned_gradient(step, q, bias.learned, accumulate=accumulate)
        if step.form != "dense" and not accumulate:
            d_learned.fill_(torch.nan)  # to be written
    sums = Gradients(
        d_out=problem.d_out,
        lse=lse,
        delta=(problem.d_out.to(dtype) * out.to(dtype)).sum(dim=-1) - problem.d_lse.to(dtype),
        dq=dq,
        dk=dk,
        dv=dv,
        d_learned=d_learned,
        accumulate=accumulate,
    )
    for columns, segments in steps:
        k_block, v_block = (x if len(steps) == 1 else x[:, :, columns] for x in (k, v))
        of_block = sums
        if accumulate:
            dk_block, dv_block = (torch.zeros_like(x, dtype=dtype) for x in (k_block, v_block))
            of_block = replace(sums, dk=dk_block, dv=dv_block)
        attention_step_backward_(q, k_block, v_block, *replace(step, segments=segments).flat(), *of_block.flat())
        if accumulate:
            dk[:, :, columns] += of_block.dk
            dv[:, :, columns] += of_block.dv
    results = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    return results if d_learned is None else results | {"d_learned": d_learned}
