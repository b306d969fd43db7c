"""Attention of packed rows: whole sequences on a CPU whose padding is left out."""

from __future__ import annotations

import torch
from torch import Tensor

from megagraph.attention.bias import Bias, DenseBias
from megagraph.attention.checks import check_inputs, check_step, check_tensor, check_values
from megagraph.attention.once import differentiable_once
from megagraph.attention.operator import make_step
from megagraph.attention.packing import Packing, Rows
from megagraph.attention.step import Gradients, State, Step


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Bias | None,
    packing: Packing,
    num_heads: int,
    *,
    dropout_p: float = 0.0,
    dropout_key: Tensor | None = None,
) -> Tensor:
    """``biased_attention`` within every sequence, by its short path.

    Args:
        q: [T, E], or [B, M, E] of the first M slots of every sequence; float32.
        k, v: [T, E] in q's dtype.
        bias: with data of all pairs, [B or 1, H or 1, M, S], M = S for packed queries.
        dropout_p, dropout_key: as for ``biased_attention``.

    Returns:
        out, shaped as q.

    Raises:
        ValueError: shape, dtype or value of an argument.
    """
    batch, length = packing.padding.shape
    num_queries = length if q.ndim == 2 else q.shape[1]
    # what the tensors would be with their padding
    q_whole, k_whole = (
        q.new_empty(()).expand(batch, num_heads, n, q.shape[-1] // num_heads) for n in (num_queries, length)
    )
    check_inputs(q_whole, k_whole, k_whole, bias, packing.padding, dropout_p, dropout_key)
    if bias is not None and bias.relation is not None:
        raise ValueError("bias must be dense beside packing, got listed pairs; pass x as it was and key_padding_mask")
    if isinstance(bias, DenseBias):  # every sequence and head writes the gradient of its own plane
        bias = DenseBias(bias.values.to(q.dtype).expand(batch, num_heads, -1, -1))
    step = make_step(q_whole, bias, None, None, dropout_p, dropout_key, "blocked", True)
    queries = packing.rows if q.ndim == 2 else Rows.whole(batch, num_queries).packed()
    rows, shape = (queries, packing.rows), (batch, num_heads, num_queries, length)
    return _PackedAttention.apply(q.flatten(0, -2), k, v, step.learned, step, rows, shape).view(q.shape)


class _PackedAttention(torch.autograd.Function):
    """Packed rows [R, E] of q, k and v; ``shape``: [B, H, M, N] of the scores, with their padding."""

    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        learned: Tensor | None,
        step: Step,
        rows: tuple[Rows, Rows],
        shape: tuple[int, int, int, int],
    ):
        from megagraph.attention.cpu import rows as loops  # Numba takes a second to import

        _check(step, q, k, v, rows, shape, q.shape[-1])
        check_values(step)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        q_h, k_h, v_h, out_h = _heads(shape[1], q, k, v, out)
        loops.forward(step, q_h, k_h, v_h, State(first=True, last=True, out=out_h), rows)
        ctx.values, tensors = step.split()
        ctx.save_for_backward(q, k, v, *tensors)
        ctx.rows, ctx.shape = rows, shape
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx, d_out: Tensor):
        from megagraph.attention.cpu import rows as loops

        q, k, v, *tensors = ctx.saved_tensors
        step = Step.join(ctx.values, iter(tensors))
        learned = step.learned
        _check(step, q, k, v, ctx.rows, ctx.shape, d_out.shape[-1])
        gradients = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        d_learned = torch.zeros_like(learned) if learned is not None and ctx.needs_input_grad[3] else None
        q, k, v, d_out, dq, dk, dv = _heads(ctx.shape[1], q, k, v, d_out, *gradients)
        none = d_out.new_empty(*d_out.shape[:2], 0)  # nobody asks for lse
        sums = Gradients(d_out=d_out, lse=none, delta=none, dq=dq, dk=dk, dv=dv, d_learned=d_learned, accumulate=False)
        loops.backward(step, q, k, v, sums, ctx.rows)
        return *gradients, d_learned, None, None, None


def _check(step: Step, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Rows, Rows], shape, width: int) -> None:
    """``check_operands`` of packed rows."""
    queries, keys = ((len(x.at), width) for x in rows)
    for name, x, like in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        check_tensor(name, x, q.device, like, torch.float32)
    check_step(step, q.device, *shape)


def _heads(num_heads: int, *tensors: Tensor) -> list[Tensor]:
    """[R, H * D] -> [1, H, R, D], the same memory."""
    return [x.unflatten(1, (num_heads, -1)).transpose(0, 1).unsqueeze(0) for x in tensors]
