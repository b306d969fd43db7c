"""Dropout of hidden states, by the hash that drops attention weights; nothing of their size is kept for backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.library import CustomOpDef

from megagraph.attention.dropout import dropout_threshold, keep_mask, row_keys
from megagraph.attention.layout import NodeLayout
from megagraph.attention.operator import is_watched
from megagraph.attention.packing import Packing
from megagraph.threads import in_threads

_NUMBERS_PER_THREAD = 1 << 19


def hidden_dropout(
    x: Tensor, p: float, key: Tensor | None, layout: NodeLayout, packing: Packing | None = None
) -> Tensor:
    """Dropout of hidden states x [B, M, d], or of packed ones [T, d]; nothing of their size is kept for backward.

    Args:
        p: probability to drop, in [0, 1).
        key: int32 [B], already specific to the layer and site; ``None`` switches dropout off.
        layout: which nodes the rows of x are, the first M of this rank's.
        packing: which of them x holds, on one rank.
    """
    if key is None or p == 0.0:
        return x
    if packing is not None:
        return _dropped(_drop_rows, x, p, row_keys(key, 1, layout.row_ids(x.device))[:, 0].flatten()[packing.slots])
    if x.is_cuda and layout.world_size == 1:
        return _dropped(_hidden_dropout, x, p, key, None)
    row_ids = layout.row_ids(x.device)[: x.shape[1]]
    if x.is_cuda:
        return _dropped(_hidden_dropout, x, p, key, row_ids)
    return _dropped(_drop_rows, x, p, row_keys(key, 1, row_ids)[:, 0])


def _dropped(operator: CustomOpDef, x: Tensor, p: float, *keys: Tensor | None) -> Tensor:
    """The operator, past the dispatcher where nobody watches, which takes longer than its kernel."""
    if is_watched(x):
        return operator(x, p, *keys)
    return _Dropout.apply(operator, x, p, *keys)


class _Dropout(torch.autograd.Function):
    """What an operator here does, whose gradient is the same of d_out."""

    @staticmethod
    def forward(ctx, operator, x, p, *keys):
        ctx.operator, ctx.p = operator, p
        ctx.save_for_backward(*keys)
        return _PLAIN[operator](x, p, *keys)

    @staticmethod
    def backward(ctx, d_out):
        keys = ctx.saved_tensors  # once: a checkpoint gives them once
        return None, _dropped(ctx.operator, d_out, ctx.p, *keys), None, *(None for _ in keys)


def _loops(x: Tensor, p: float, row_key: Tensor) -> Tensor:
    """x [..., d] without what row_key int32 [...] drops."""
    scale = 1.0 / (1.0 - p)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or x.numel() == 0:
        return keep_mask(row_key, torch.arange(x.shape[-1], device=x.device), p).to(x.dtype).mul_(x).mul_(scale)
    from megagraph.attention.cpu.dropout import drop  # Numba takes a second to import

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, kept = (tensor.detach().reshape(-1, x.shape[-1]).contiguous().numpy() for tensor in (x, out))
    keys = row_key.flatten().numpy().view(np.uint32)
    threshold, factor = np.uint32(dropout_threshold(p)), rows.dtype.type(scale)

    def run(_: int, first: int, last: int) -> None:
        drop(rows[first:last], keys[first:last], threshold, factor, kept[first:last])

    in_threads(run, np.full(len(rows), rows.shape[1]), _NUMBERS_PER_THREAD)
    return out


def _kernel(x: Tensor, p: float, key: Tensor, row_ids: Tensor | None) -> Tensor:
    """x [B, M, d] without what key int32 [B] drops; ``row_ids``: integer [M], None where they are 0, 1, ..."""
    from megagraph.kernels.hidden_dropout import launch_hidden_dropout

    if not x.numel():
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    return launch_hidden_dropout(x, key.contiguous(), None if row_ids is None else row_ids.contiguous(), p)


_drop_rows = torch.library.custom_op("megagraph::drop_rows", _loops, mutates_args=())
_hidden_dropout = torch.library.custom_op("megagraph::hidden_dropout", _kernel, mutates_args=())
_PLAIN: dict[CustomOpDef, Callable[..., Tensor]] = {_drop_rows: _loops, _hidden_dropout: _kernel}


@_drop_rows.register_fake
def _(x, p, row_key):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_hidden_dropout.register_fake
def _(x, p, key, row_ids):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx, inputs, output):
    _, ctx.p, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(operator: CustomOpDef) -> Callable[..., Any]:
    def backward(ctx, d_out):
        keys = ctx.saved_tensors
        return operator(d_out, ctx.p, *keys), None, *(None for _ in keys)

    return backward


for _operator in _PLAIN:
    _operator.register_autograd(_backward(_operator), setup_context=_setup_context)
