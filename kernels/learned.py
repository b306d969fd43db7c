"""dq and the gradient of a bucket table or of a projection, from one ds.

    dT[h, r] = sum of ds[b, h, i, j] over the pairs whose index is r
    dW[h, c] = sum of ds[b, h, i, j] * channels[b, c, i, j]

Both sums are products on the tensor cores: one-hot indices [R, pairs], or channels [C, pairs], times ds [pairs, heads];
the bias of a projection is one of channels and weights. A program owns some queries of several heads, which share
index, one-hot matrix and channels. Partial sums of the programs are added up by the caller, in one order. Atomics would
need none of this, and their order would change the sums from run to run.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.halves import equal
from megagraph.kernels.heads import HeadRows, hide_of_heads, load_heads, write_heads
from megagraph.kernels.tile import (
    REST,
    TABLE_SIZE,
    Keys,
    Queries,
    add_dot,
    bucket_tile,
    dot,
    exp,
    head_ptr,
    load_lse,
    loop,
    plane_offsets,
    row_offsets,
    segment,
)


class Rows(NamedTuple):
    """What a program knows of its queries, [GROUP, BLOCK_M, .]."""

    q: tl.tensor
    do: tl.tensor
    lse: tl.tensor
    delta: tl.tensor


class Heads(NamedTuple):
    """The heads of a program, and the learned part of their bias."""

    first: tl.tensor
    table: tl.tensor | None  # pointer to [TABLE_SIZE, GROUP]
    codes: tl.tensor | None  # [1, ROWS, 1], of the table's rows
    weights: tl.tensor | None  # [ROWS, GROUP]


@triton.jit
def _load(x, t, heads, queries, keys, offs, TOGETHER: tl.constexpr, MASKED: tl.constexpr):
    """Rows of the keys of several heads of t, as ``load_heads``; TOGETHER: heads of a row lie side by side."""
    if TOGETHER:
        GROUP: tl.constexpr = queries.h.shape[0]
        offsets, in_d = row_offsets(x, t, offs)
        start = head_ptr(x, t, queries.b, heads.first)
        start += keys.start * (t.strides[2] // x.ALIGNMENT * x.ALIGNMENT)
        # Heads are constants then. In 64 bits, as these need no room of their own if the sum cannot overflow; said to
        # be contiguous along rows, which they are not, so that the heads of a row are loaded by one thread.
        offsets = offsets.to(tl.int64)[None, :, :] + (tl.arange(0, GROUP) * x.D)[:, None, None]
        ptrs = start + tl.max_contiguous(offsets, [1, 2, x.BLOCK_D])
        if MASKED:
            return tl.load(ptrs, mask=((offs < keys.left)[:, None] & in_d)[None, :, :], other=0.0)
        elif x.D < x.BLOCK_D:
            return tl.load(ptrs, mask=in_d[None, :, :], other=0.0)
        else:
            return tl.load(ptrs)
    else:
        return load_heads(x, t, HeadRows(queries.b, queries.h, keys.start, offs), keys.left, MASKED)


@triton.jit
def _load_channels(x, queries, keys, offs_n, inside, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """Channels [BLOCK_M, BLOCK_N, ROWS] of each pair, over and over."""
    stride_b, stride_c, stride_m, stride_n = x.data.strides
    offs_c = (tl.arange(0, ROWS) % x.NUM_CHANNELS).to(x.OFFSETS) * stride_c
    plane = plane_offsets(x, stride_m, stride_n, queries.offs, offs_n)
    start = x.data.ptr + queries.b * stride_b + queries.row * stride_m + keys.col * stride_n
    ptrs = start + (offs_c[None, None, :] + plane[:, :, None])
    return tl.load(ptrs, mask=inside[:, :, None], other=0.0) if MASKED else tl.load(ptrs)


@triton.jit
def _weights(x, heads, dtype: tl.constexpr, ROWS: tl.constexpr):
    """The projection [ROWS, GROUP] as an operand: rounded to dtype, then what that left out, then zeros."""
    stride_h, stride_c = x.learned.strides
    offs_c = tl.arange(0, ROWS)[:, None]
    weight = tl.load(x.learned.ptr + heads[None, :] * stride_h + offs_c % x.NUM_CHANNELS * stride_c).to(x.ACC_DTYPE)
    high = weight.to(dtype)
    low = (weight - high.to(x.ACC_DTYPE)).to(dtype)
    return tl.where(offs_c < x.NUM_CHANNELS, high, tl.where(offs_c < 2 * x.NUM_CHANNELS, low, 0.0))


@triton.jit
def one_hot(x, bucket, codes, WARPS: tl.constexpr, dtype: tl.constexpr):
    """[WARPS, ROWS, pairs of a warp]: 1 where the bucket of a pair of a tile is that of codes [1, ROWS, 1]."""
    PAIRS: tl.constexpr = bucket.shape[0] * bucket.shape[1] // WARPS
    here, codes = tl.broadcast(tl.reshape(bucket.to(tl.int16) | x.CODE, [WARPS, 1, PAIRS]), codes)
    return equal(x, here, codes, dtype)


@triton.jit
def add_learned(sums, factor, ds):
    """Add ds [GROUP, BLOCK_M, BLOCK_N] times factor [WARPS, ROWS, pairs of a warp] to sums [WARPS, ROWS, GROUP]."""
    turned = tl.permute(tl.reshape(ds, [ds.shape[0], sums.shape[0], factor.shape[2]]), (1, 2, 0))
    return add_dot(sums, factor, turned)


@triton.jit
def _learned_tile(
    x, dq, sums, rows, heads, queries, keys, bucket,
    TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys to dq and to sums [WARPS, ROWS, GROUP]: every warp sums pairs of its own, so that none
    does the work of another."""
    q, do, lse, delta = rows
    GROUP: tl.constexpr = q.shape[0]
    BLOCK_M: tl.constexpr = q.shape[1]
    WARPS: tl.constexpr = sums.shape[0]
    ROWS: tl.constexpr = sums.shape[1]
    PAIRS: tl.constexpr = BLOCK_M * BLOCK_N // WARPS
    offs_n = tl.arange(0, BLOCK_N)
    in_cols = offs_n < keys.left
    inside = queries.inside[:, None] & in_cols[None, :]
    if x.FORM == "bucket":
        # four heads are one load; the pointers first, as offsets added to each other are added again for each entry
        entries = heads.table + bucket.to(tl.int32)[None, :, :] * GROUP
        bias = tl.load(entries + tl.arange(0, GROUP)[:, None, None])
    else:
        channels = _load_channels(x, queries, keys, offs_n, inside, ROWS, MASKED).to(q.dtype)
        channels = tl.reshape(channels, [WARPS, PAIRS, ROWS])
        bias = dot(x, channels, tl.broadcast_to(heads.weights[None, :, :], [WARPS, ROWS, GROUP]))
        bias = tl.permute(tl.reshape(bias, [BLOCK_M, BLOCK_N, GROUP]), (2, 0, 1))
    k = _load(x, x.k, heads, queries, keys, offs_n, TOGETHER, MASKED)
    s = dot(x, q, tl.permute(k, (0, 2, 1))) * x.scale + bias
    p = exp(x, hide_of_heads(x, s, queries, keys, offs_n, in_cols, MASKED), lse)
    v = _load(x, x.v, heads, queries, keys, offs_n, TOGETHER, MASKED)
    dp = dot(x, do, tl.permute(v, (0, 2, 1)))
    if x.THRESHOLD > 0:
        drop = dropped(x, queries.keys[:, :, None], (keys.col + offs_n)[None, None, :])
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    ds = (p * (dp - delta)).to(q.dtype)  # 0 for a masked pair, whose p is 0
    dq = add_dot(dq, ds, k)
    if x.FORM == "bucket":  # loaded again, in the layout of this product
        factor = one_hot(x, bucket_tile(x, queries, keys, offs_n, inside, MASKED), heads.codes, WARPS, q.dtype)
    else:
        factor = tl.permute(channels, (0, 2, 1))
    return dq, add_learned(sums, factor, ds)


@triton.jit
def _learned_keys(
    x, dq, sums, rows, heads, queries, i,
    TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the shares of the keys of segment i."""
    key_start, column_start, length = segment(x, i)
    whole = length // BLOCK_N * BLOCK_N
    ahead = None
    if x.FORM == "bucket":
        # a tile ahead: an 8-bit load before a product would make its operands those of an 8-bit one
        offs_n = tl.arange(0, BLOCK_N)
        every = queries.inside[:, None] & (offs_n < BLOCK_N)[None, :]
        first = Keys(None, None, key_start, column_start, length)
        ahead = bucket_tile(x, queries, first, offs_n, every & (whole > 0), True)
    for start in loop(0, whole, BLOCK_N):
        bucket = None
        if x.FORM == "bucket":
            bucket = ahead
            following = tl.minimum(start + BLOCK_N, whole - BLOCK_N)
            ahead = bucket_tile(
                x, queries, Keys(None, None, key_start, column_start + following, length), offs_n, every, False
            )
        keys = Keys(None, None, key_start + start, column_start + start, length - start)
        dq, sums = _learned_tile(x, dq, sums, rows, heads, queries, keys, bucket, TOGETHER, BLOCK_N, False)
    for start in loop(whole, length, REST):
        keys = Keys(None, None, key_start + start, column_start + start, length - start)
        bucket = None
        if x.FORM == "bucket":
            offs_rest = tl.arange(0, REST)
            inside = queries.inside[:, None] & (offs_rest < keys.left)[None, :]
            bucket = bucket_tile(x, queries, keys, offs_rest, inside, True)
        dq, sums = _learned_tile(x, dq, sums, rows, heads, queries, keys, bucket, TOGETHER, REST, True)
    return dq, sums


@triton.jit
def learned_pass(
    x, saved, dq_out, partials, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
    TOGETHER: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of GROUP heads, over all keys, and their share of the gradient, partials
    [B, num_tiles, groups, GROUP, ROWS]; a table is [groups, TABLE_SIZE, GROUP] here.

    Grid (B * num_tiles * groups); heads vary fastest, as in forward.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(x.H, GROUP)
    group = pid % groups
    b = pid // groups // num_tiles
    row = pid // groups % num_tiles * BLOCK_M
    offs_h = group * GROUP + tl.arange(0, GROUP)
    h = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, with p = 0
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)  # rows beyond M likewise
    exists = (offs_h < x.H)[:, None] & in_rows[None, :]
    stat = (b * x.H + h)[:, None] * x.M + row + offs_m[None, :]
    of_rows = HeadRows(b, h, row, offs_m)
    q = load_heads(x, x.q, of_rows, x.M, False)
    do = load_heads(x, saved.d_out, of_rows, x.M, False)
    delta = tl.load(saved.delta + stat, mask=exists, other=0.0)[:, :, None]
    rows = Rows(q, do, load_lse(x, saved.lse, stat, exists), delta)
    queries = Queries(b, h, row, offs_m, in_rows, row_keys(x, b, h[:, None], (row + offs_m)[None, :]))
    if x.FORM == "bucket":
        # loaded, not computed: only of a load does the compiler move the change of layout out of the loop
        codes = tl.load(x.codes + tl.arange(0, ROWS))[None, :, None]
        heads = Heads(group * GROUP, x.learned.ptr + group * (TABLE_SIZE * GROUP), codes, None)
    else:
        heads = Heads(group * GROUP, None, None, _weights(x, h, q.dtype, ROWS))
    dq = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    sums = tl.zeros([WARPS, ROWS, GROUP], x.ACC_DTYPE)
    for i in loop(0, x.num_segments, 1):
        dq, sums = _learned_keys(x, dq, sums, rows, heads, queries, i, TOGETHER, BLOCK_N)
    write_heads(x, dq_out, of_rows, exists, dq * x.scale, ACCUMULATE)
    offs_sums = tl.arange(0, ROWS)[:, None] + tl.arange(0, GROUP)[None, :] * ROWS
    tl.store(partials + pid * (ROWS * GROUP) + offs_sums, tl.sum(sums, axis=0))
