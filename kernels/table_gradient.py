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
    REST,
    Keys,
    Queries,
    add_dot,
    bucket_tile,
    dot,
    dropped,
    exp,
    load_heads,
    load_lse,
    loop,
    row_keys,
    scores_of_heads,
    segment,
)


@triton.jit
def add_one_hot(sums, bucket, ds, WARPS: tl.constexpr):
    """sums[w, r, h] += ds[h, pair] of the pairs in bucket r.

    Every warp w sums pairs of its own, so that none does the work of another; two pairs at a time, so that stores of
    the one-hot matrix to shared memory are 32 bits wide.
    """
    GROUP: tl.constexpr = ds.shape[0]
    R: tl.constexpr = sums.shape[1]
    PAIRS: tl.constexpr = ds.shape[1] * ds.shape[2] // WARPS
    even, odd = tl.split(tl.reshape(bucket, [WARPS, PAIRS // 2, 2]))
    offs_r = tl.arange(0, R)[None, :, None]
    one_hot = tl.join(even[:, None, :] == offs_r, odd[:, None, :] == offs_r).to(ds.dtype)
    ds = tl.permute(tl.reshape(ds, [GROUP, WARPS, PAIRS]), (1, 2, 0))
    return add_dot(sums, tl.reshape(one_hot, [WARPS, R, PAIRS]), ds)


@triton.jit
def _table_tile(
    x, sums, q, do, lse, delta, queries, keys, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Add the pairs with these keys to the sums [WARPS, R, GROUP]."""
    b, col = queries.b, keys.col
    offs_n = tl.arange(0, BLOCK_N)
    in_cols = offs_n < keys.left
    inside = queries.inside[:, None] & in_cols[None, :]
    bucket = bucket_tile(x, queries, keys, offs_n, inside, MASKED)
    k = load_heads(x, x.k, b, queries.h, keys.start, offs_n, keys.left, MASKED)
    v = load_heads(x, x.v, b, queries.h, keys.start, offs_n, keys.left, MASKED)
    qk = dot(x, q, tl.permute(k, (0, 2, 1)))
    s = scores_of_heads(x, qk, queries, keys, offs_n, in_cols, MASKED)
    p = exp(x, s, lse)
    dp = dot(x, do, tl.permute(v, (0, 2, 1)))
    if x.THRESHOLD > 0:
        drop = dropped(x, queries.keys[:, :, None], (col + offs_n)[None, None, :])
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    return add_one_hot(sums, bucket, (p * (dp - delta)).to(k.dtype), WARPS)


@triton.jit
def table_program(
    x, saved, d_table, b, group, tile, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """d_table [B, groups, num_tiles, BLOCK_R, GROUP]: the share of BLOCK_M queries and GROUP heads, over all keys."""
    row = tile * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)
    offs_h = group * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, with p = 0
    q = load_heads(x, x.q, b, heads, row, offs_m, x.M, False)
    do = load_heads(x, saved.d_out, b, heads, row, offs_m, x.M, False)
    stat = (b * x.H + heads)[:, None] * x.M + row + offs_m[None, :]
    exists = (offs_h < x.H)[:, None] & in_rows[None, :]
    lse = load_lse(x, saved.lse, stat, exists)
    delta = tl.load(saved.delta + stat, mask=exists, other=0.0)[:, :, None]
    queries = Queries(b, heads, row, offs_m, in_rows, row_keys(x, b, heads[:, None], (row + offs_m)[None, :]))
    sums = tl.zeros([WARPS, BLOCK_R, GROUP], x.ACC_DTYPE)
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            for start in loop(whole if MASKED else 0, length if MASKED else whole, REST if MASKED else BLOCK_N):
                keys = Keys(None, None, key_start + start, column_start + start, length - start)
                sums = _table_tile(
                    x, sums, q, do, lse, delta, queries, keys, REST if MASKED else BLOCK_N, WARPS, MASKED
                )
    offs_r = tl.arange(0, BLOCK_R)[:, None]
    ptrs = d_table.ptr + (((b * tl.cdiv(x.H, GROUP) + group) * num_tiles + tile) * BLOCK_R + offs_r) * GROUP
    tl.store(ptrs + tl.arange(0, GROUP)[None, :], tl.sum(sums, axis=0))
