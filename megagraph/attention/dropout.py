"""Dropout whose mask is a pure function of (key, head, row, column), so that it does not depend on the layout.

    row_key = mix32(mix32(key ^ head) ^ row)
    dropped = mix32(row_key ^ column * 0x9E3779B9) < floor(p * 2**32)        unsigned 32-bit arithmetic

mix32 is the finaliser of MurmurHash3 (Appleby, public domain). The same three lines run in Triton on uint32; here
they run in int32, whose products and sums wrap to the same bits.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.layout import NodeLayout
from megagraph.attention.packing import Packing
from megagraph.attention.threads import in_threads

_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2**32 / golden ratio: spreads neighbouring columns over all bits
_MUL_1 = 0x85EBCA6B - (1 << 32)
_MUL_2 = 0xC2B2AE35 - (1 << 32)
_NUMBERS_PER_THREAD = 1 << 19


def dropout_threshold(p: float) -> int:
    """Hash values below this are dropped; 0 <= p < 1."""
    return int(p * (1 << 32))


def mix32(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser, elementwise on int32."""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        x = x.clone(memory_format=torch.contiguous_format)
        _compiled().mix32_(_unsigned(x))
        return x
    # the masks turn int32's arithmetic shifts into logical ones; in place, because this runs once per score
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(_MUL_1)
    x = x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(_MUL_2)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _as_int32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def mix_key(key: Tensor, *values: int | Tensor) -> Tensor:
    """Fold ``values`` (ints, or integer tensors that broadcast with ``key``) into an int32 ``key``, one by one."""
    for value in values:
        key = mix32(key ^ (_as_int32(value) if isinstance(value, int) else value.to(torch.int32)))
    return key


def dropout_keys(seed: int, step: int, sequence_ids: Tensor) -> Tensor:
    """Base key of each sequence, int32 [B]; a layer and site are folded in with :func:`mix_key`.

    Args:
        seed, step: integers; their low 32 bits count.
        sequence_ids: integer [B], position of each sequence in the *global* batch.
    """
    start = torch.zeros(1, dtype=torch.int32, device=sequence_ids.device)
    return mix_key(start, seed, step, sequence_ids)


def row_keys(key: Tensor, heads: int, rows: Tensor) -> Tensor:
    """int32 [B, heads, M] from the key of each sequence [B] and the global row ids [M]."""
    head_ids = torch.arange(heads, dtype=torch.int32, device=key.device)
    return mix32(mix32(key[:, None] ^ head_ids)[:, :, None] ^ rows.to(torch.int32))


def keep_mask(row_key: Tensor, columns: Tensor, p: float) -> Tensor:
    """int32 [..., N], 1 = kept and 0 = dropped, from row keys [...] and the global column ids [N]."""
    hashed = mix32(row_key[..., None] ^ (columns.to(torch.int32) * _GOLDEN))
    sign = -(1 << 31)  # flipping the sign bit orders int32 as unsigned
    return hashed.bitwise_xor_(sign).ge_(dropout_threshold(p) + sign)


def _compiled() -> ModuleType:
    from megagraph.attention import compiled  # Numba takes a second to import

    return compiled


def _unsigned(keys: Tensor) -> np.ndarray:
    """int32 [...] as the compiled loops take them, uint32 [R]."""
    return keys.flatten().numpy().view(np.uint32)


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
    loops, out = _compiled(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, kept = (tensor.detach().reshape(-1, x.shape[-1]).contiguous().numpy() for tensor in (x, out))
    keys, threshold, factor = _unsigned(row_key), np.uint32(dropout_threshold(p)), rows.dtype.type(scale)

    def run(_: int, first: int, last: int) -> None:
        loops.drop(rows[first:last], keys[first:last], threshold, factor, kept[first:last])

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
