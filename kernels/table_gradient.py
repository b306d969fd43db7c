"""The gradient of a bucket table: dT[h, r] = sum of ds[b, h, i, j] over the pairs whose index is r.

As a product on the tensor cores: one-hot indices [R, pairs] times ds [pairs, heads]. A program owns some queries of
several heads, which share the index and so the one-hot matrix; ds is computed again, as in a query program. Partial
sums of the programs are added up by the caller, in one order. Atomics would need none of this, and their order would
change the sums from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.tile import (
    INTERPRET,
    LOG2E,
    REST,
    TABLE_SIZE,
    add_dot,
    bucket_tile,
    dot,
    dropped,
    exp,
    loop,
    row_keys,
    segment,
)


@triton.jit
def _load_heads(x, t, b, heads, start, offs, left, MASKED: tl.constexpr):
    """Rows start + offs of several heads of t, [GROUP, BLOCK, BLOCK_D]; zero beyond D and, if MASKED, ``left``."""
    offs_d = tl.arange(0, x.BLOCK_D)[None, None, :]
    stride_b = t.strides[0] // x.ALIGNMENT * x.ALIGNMENT
    stride_h = t.strides[1] // x.ALIGNMENT * x.ALIGNMENT
    stride_row = t.strides[2] // x.ALIGNMENT * x.ALIGNMENT
    offsets = heads.to(x.OFFSETS)[:, None, None] * stride_h + offs.to(x.OFFSETS)[None, :, None] * stride_row
    mask = offs_d < x.D
    if MASKED:
        mask = mask & (offs < left)[None, :, None]
    ptrs = (t.ptr + b * stride_b + start * stride_row) + (offsets + offs_d * t.strides[3])
    rows = tl.load(ptrs, mask=mask, other=0.0)
    if INTERPRET and rows.dtype == tl.bfloat16:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _table_tile(
    x, sums, q, do, lse, delta, keys, b, heads, row, offs_m, in_rows, key, col, left,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """sums[w, r, h] += ds of the pairs in bucket r. Every warp w sums pairs of its own, so that none does the work of
    another; two pairs at a time, so that stores of the one-hot matrix to shared memory are 32 bits wide."""
    offs_n = tl.arange(0, BLOCK_N)
    in_cols = offs_n < left
    inside = in_rows[:, None] & in_cols[None, :]
    bucket = bucket_tile(x, b, row, offs_m, col, offs_n, inside, MASKED)
    k = _load_heads(x, x.k, b, heads, key, offs_n, left, MASKED)
    v = _load_heads(x, x.v, b, heads, key, offs_n, left, MASKED)
    s = dot(x, q, tl.permute(k, (0, 2, 1))) * x.scale
    s += tl.load(x.learned.ptr + heads[:, None, None] * TABLE_SIZE + bucket.to(tl.int32)[None, :, :])
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        padding = tl.load(x.padding.ptr + b * stride_b + (col + offs_n) * stride_n, mask=in_cols, other=0)
        s += tl.where(padding == 0, 0.0, -float("inf"))[None, None, :]
    p = exp(x, s, lse)
    dp = dot(x, do, tl.permute(v, (0, 2, 1)))
    if x.THRESHOLD > 0:
        drop = dropped(x, keys[:, :, None], (col + offs_n)[None, None, :])
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    ds = p * (dp - delta)
    if MASKED:
        ds = tl.where(inside[None, :, :], ds, 0.0)
    GROUP: tl.constexpr = ds.shape[0]
    R: tl.constexpr = sums.shape[1]
    PAIRS: tl.constexpr = ds.shape[1] * BLOCK_N // WARPS
    even, odd = tl.split(tl.reshape(bucket, [WARPS, PAIRS // 2, 2]))
    offs_r = tl.arange(0, R)[None, :, None]
    one_hot = tl.join(even[:, None, :] == offs_r, odd[:, None, :] == offs_r).to(k.dtype)
    ds = tl.permute(tl.reshape(ds.to(k.dtype), [GROUP, WARPS, PAIRS]), (1, 2, 0))
    return add_dot(sums, tl.reshape(one_hot, [WARPS, R, PAIRS]), ds)


@triton.jit
def table_program(
    x, d_out, lse_ptr, delta_ptr, d_table, b, group, tile, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """d_table [B, groups, num_tiles, BLOCK_R, GROUP]: the share of BLOCK_M queries and GROUP heads, over all keys."""
    row = tile * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)
    offs_h = group * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, with p = 0
    q = _load_heads(x, x.q, b, heads, row, offs_m, x.M, False)
    do = _load_heads(x, d_out, b, heads, row, offs_m, x.M, False)
    stat = (b * x.H + heads)[:, None] * x.M + row + offs_m[None, :]
    exists = (offs_h < x.H)[:, None] & in_rows[None, :]
    lse = tl.load(lse_ptr + stat, mask=exists, other=float("inf"))[:, :, None]
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    if x.FOLD:
        lse *= LOG2E
    delta = tl.load(delta_ptr + stat, mask=exists, other=0.0)[:, :, None]
    keys = row_keys(x, b, heads[:, None], (row + offs_m)[None, :])
    sums = tl.zeros([WARPS, BLOCK_R, GROUP], x.ACC_DTYPE)
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for start in loop(0, whole, BLOCK_N):
            sums = _table_tile(
                x, sums, q, do, lse, delta, keys, b, heads, row, offs_m, in_rows, key_start + start,
                column_start + start, BLOCK_N, BLOCK_N, WARPS, False,
            )  # fmt: skip
        for start in loop(whole, length, REST):
            sums = _table_tile(
                x, sums, q, do, lse, delta, keys, b, heads, row, offs_m, in_rows, key_start + start,
                column_start + start, length - start, REST, WARPS, True,
            )  # fmt: skip
    offs_r = tl.arange(0, BLOCK_R)[:, None]
    ptrs = d_table.ptr + (((b * tl.cdiv(x.H, GROUP) + group) * num_tiles + tile) * BLOCK_R + offs_r) * GROUP
    tl.store(ptrs + tl.arange(0, GROUP)[None, :], tl.sum(sums, axis=0))
