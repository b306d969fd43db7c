"""Which elements are dropped, as ``megagraph.attention.dropout`` says it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _fold(x):
    """First step of MurmurHash3's 32-bit finaliser, on uint32: _fold(x ^ y) = _fold(x) ^ _fold(y)."""
    return x ^ (x >> 16)


@triton.jit
def _mix_folded(x):
    """MurmurHash3's 32-bit finaliser on uint32, from what :func:`_fold` gives."""
    x *= 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def mix32(x):
    """MurmurHash3's 32-bit finaliser on uint32."""
    return _mix_folded(_fold(x))


@triton.jit
def row_keys(x, b, h, rows):
    """uint32 dropout key of each query row: mix32(mix32(key[b] ^ h) ^ global row)."""
    global_rows = rows
    if x.THRESHOLD > 0:
        if x.row_ids is not None:
            global_rows = tl.load(x.row_ids + rows)
        if x.first_head is not None:
            h += x.first_head
        key = tl.load(x.dropout_key + b).to(tl.uint32, bitcast=True)
        keys = mix32(mix32(key ^ h.to(tl.uint32)) ^ global_rows.to(tl.uint32))
    else:
        keys = global_rows.to(tl.uint32)  # never read
    return keys


@triton.jit
def dropped(x, keys, cols):
    """True = dropped: mix32(row key ^ column * constant); row keys and columns broadcast to the tile, and are folded
    before they do."""
    if x.first_column is not None:
        cols += x.first_column
    return _mix_folded(_fold(keys) ^ _fold(cols.to(tl.uint32) * 0x9E3779B9)) < x.THRESHOLD
