"""Dropout of hidden states, by the hash that drops attention weights; nothing of their size is kept for backward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.dropout import dropout_threshold, keep_mask, row_keys
from megagraph.attention.layout import NodeLayout
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
        return _drop_rows(x, p, row_keys(key, 1, layout.row_ids(x.device))[:, 0].flatten()[packing.slots])
    if x.is_cuda and layout.world_size == 1:
        return _hidden_dropout(x, p, key, None)
    row_ids = layout.row_ids(x.device)[: x.shape[1]]
    return _hidden_dropout(x, p, key, row_ids) if x.is_cuda else _drop_rows(x, p, row_keys(key, 1, row_ids)[:, 0])


@torch.library.custom_op("megagraph::drop_rows", mutates_args=())
def _drop_rows(x: Tensor, p: float, row_key: Tensor) -> Tensor:
    """x [..., d] without what row_key int32 [...] drops; its gradient is the same dropout of d_out."""
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


@_drop_rows.register_fake
def _(x, p, row_key):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("megagraph::hidden_dropout", mutates_args=())
def _hidden_dropout(x: Tensor, p: float, key: Tensor, row_ids: Tensor | None) -> Tensor:
    """The kernel; its gradient is the same dropout of d_out. ``row_ids``: integer [M], None where they are 0, 1, ..."""
    from megagraph.kernels.hidden_dropout import launch_hidden_dropout

    out = torch.empty_like(x)
    if x.numel():
        launch_hidden_dropout(x, out, p, key, row_ids)
    return out


@_hidden_dropout.register_fake
def _(x, p, key, row_ids):
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):
    _, ctx.p, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, d_out):
    return _hidden_dropout(d_out, ctx.p, *ctx.saved_tensors), None, None, None


def _drop_rows_backward(ctx, d_out):
    return _drop_rows(d_out, ctx.p, *ctx.saved_tensors), None, None


_hidden_dropout.register_autograd(_backward, setup_context=_setup_context)
_drop_rows.register_autograd(_drop_rows_backward, setup_context=_setup_context)
