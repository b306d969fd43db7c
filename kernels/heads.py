"""What kernels of several heads a program share: rows [GROUP, BLOCK, D] of a group of heads, and their scores."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from megagraph.kernels.tile import padding_of, plane_offsets, readable


class HeadRows(NamedTuple):
    """Rows of several heads, of queries or of keys."""

    b: tl.tensor
    heads: tl.tensor  # [GROUP]
    start: tl.tensor
    offs: tl.tensor  # [BLOCK] from there


@triton.jit
def heads_ptrs(x, t, of, WIDTH: tl.constexpr):
    """Rows of several heads of t, pointers [GROUP, BLOCK, WIDTH]."""
    stride_b = t.strides[0] // x.ALIGNMENT * x.ALIGNMENT
    stride_h = t.strides[1] // x.ALIGNMENT * x.ALIGNMENT
    stride_row = t.strides[2] // x.ALIGNMENT * x.ALIGNMENT
    offsets = of.heads.to(x.OFFSETS)[:, None, None] * stride_h + of.offs.to(x.OFFSETS)[None, :, None] * stride_row
    offs_d = tl.arange(0, WIDTH).to(x.OFFSETS)[None, None, :]
    return (t.ptr + of.b * stride_b + of.start * stride_row) + (offsets + offs_d * t.strides[3])


@triton.jit
def load_heads(x, t, of, left, MASKED: tl.constexpr, beyond=0.0):
    """Rows of several heads of t, [GROUP, BLOCK, BLOCK_D], or as wide as ``beyond``, which stands beyond D and, if
    MASKED, ``left``."""
    WIDTH: tl.constexpr = beyond.shape[2] if isinstance(beyond, tl.tensor) else x.BLOCK_D
    in_d = (tl.arange(0, WIDTH) < x.D)[None, None, :]
    ptrs = heads_ptrs(x, t, of, WIDTH)
    if MASKED:
        rows = tl.load(ptrs, mask=in_d & (of.offs < left)[None, :, None], other=beyond)
    elif x.D < WIDTH:
        rows = tl.load(ptrs, mask=in_d, other=beyond)
    else:
        rows = tl.load(ptrs)
    return readable(rows)


@triton.jit
def write_heads(x, t, of, exist, values, ACCUMULATE: tl.constexpr):
    """Rows of several heads of t = values [GROUP, BLOCK, .], or +=, where they exist [GROUP, BLOCK]; they are this
    program's alone."""
    WIDTH: tl.constexpr = values.shape[2]
    ptrs = heads_ptrs(x, t, of, WIDTH)
    keep = exist[:, :, None] & (tl.arange(0, WIDTH) < x.D)[None, None, :]
    if ACCUMULATE:
        values += tl.load(ptrs, mask=keep, other=0.0)
    tl.store(ptrs, values, mask=keep)


@triton.jit
def planes_ptrs(x, t, queries, keys, offs_n):
    """The planes of several heads of t at some queries and the keys at offs_n, pointers [GROUP, BLOCK_M, BLOCK_N]."""
    heads = tl.minimum(queries.h, x.H - 1)
    stride_b, stride_h, stride_m, stride_n = t.strides
    plane = plane_offsets(x, stride_m, stride_n, queries.offs, offs_n)
    ptrs = t.ptr + queries.b * stride_b + queries.row * stride_m + keys.col * stride_n
    return ptrs + (heads.to(tl.int64)[:, None, None] * stride_h + plane[None, :, :])


@triton.jit
def hide_of_heads(x, s, queries, keys, offs_n, in_cols, MASKED: tl.constexpr):
    """Scores [GROUP, BLOCK_M, BLOCK_N], -inf where masked or outside; 255 is masked by the table itself."""
    inside = queries.inside[:, None] & in_cols[None, :]
    if x.padding is not None:
        s += padding_of(x, queries.b, keys.col, offs_n, in_cols, MASKED)[None, None, :]
    if MASKED:
        s = tl.where(inside[None, :, :], s, -float("inf"))
    return s
