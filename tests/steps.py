"""Attention step by step, as a ring takes it, by the kernels or on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from megagraph.attention import blocked
from megagraph.attention.operator import _path, learned_gradient
from megagraph.attention.step import Step
from tests.problems import DEVICE, Problem


def one_step(N):
    return [(torch.arange(N, device=DEVICE), [(0, 0, N)])]


def run_steps(problem: Problem, steps=None, row_ids=None, learned_grad=True, impl="triton_long") -> dict[str, Tensor]:
    """out, lse and gradients; steps: (global columns of the visiting keys, segments) each."""
    from megagraph.kernels import biased_attention as kernels

    q, k, v = problem.q, problem.k, problem.v
    B, H, M, D = q.shape
    dtype = torch.promote_types(q.dtype, torch.float32)
    steps = steps or one_step(k.shape[2])
    bias = problem.bias
    inputs = dict(
        form="none" if bias is None else bias.form,
        data=None if bias is None else bias.data,
        learned=None if bias is None else bias.learned,
        bias_mask=None if bias is None else bias.mask,
        key_padding_mask=problem.padding,
        scale=D**-0.5,
        dropout_p=problem.dropout_p,
        dropout_key=problem.dropout_key,
        row_ids=row_ids,
    )
    out, lse = torch.empty_like(q), torch.empty(B, H, M, dtype=dtype, device=DEVICE)
    m, l, acc = (torch.empty(B, H, M, *tail, dtype=dtype, device=DEVICE) for tail in ((), (), (D,)))
    for i, (columns, segments) in enumerate(steps):
        first, last = i == 0, i == len(steps) - 1
        state = dict(m=None, l=None, acc=None) if first and last else dict(m=m, l=l, acc=acc)
        result = dict(out=out, lse=lse) if last else dict(out=None, lse=None)
        kv = (x if len(steps) == 1 else x[:, :, columns] for x in (k, v))
        step, call = Step(**inputs, segments=segments), dict(first=first, last=last, **state, **result)
        if impl != "blocked":
            kernels.launch_step_fwd(q, *kv, **vars(step), **call, path=_path(impl))
        else:
            blocked.attention_step(step, q, *kv, **call)

    delta = (problem.d_out.to(dtype) * out.to(dtype)).sum(dim=-1) - problem.d_lse.to(dtype)
    accumulate = impl == "blocked" or len(steps) > 1
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) if accumulate else torch.empty_like(x) for x in (q, k, v))
    d_learned = None
    if learned_grad and bias is not None:
        d_learned = learned_gradient(bias.form, q, bias.learned)
    for columns, segments in steps:
        k_block, v_block = (x if len(steps) == 1 else x[:, :, columns] for x in (k, v))
        dk_block, dv_block = dk, dv
        if len(steps) > 1:
            dk_block, dv_block = (torch.zeros_like(x, dtype=dtype) for x in (k_block, v_block))
        step = Step(**inputs, segments=segments)
        call = dict(d_out=problem.d_out, lse=lse, delta=delta, dq=dq, dk=dk_block, dv=dv_block, d_learned=d_learned)
        if impl != "blocked":
            kernels.launch_step_bwd(q, k_block, v_block, **vars(step), **call, accumulate=accumulate, path=_path(impl))
        else:
            blocked.attention_step_backward(step, q, k_block, v_block, **call)
        if len(steps) > 1:
            dk[:, :, columns] += dk_block
            dv[:, :, columns] += dv_block
    results = dict(out=out, lse=lse, dq=dq, dk=dk, dv=dv)
    return results if d_learned is None else results | {"d_learned": d_learned}
