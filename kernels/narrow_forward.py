"""Forward of narrow heads, D <= 16, several to a program: in fp32, and where a table is gathered from memory.

The equations, and the softmax so far, are those of ``forward``. Heads of a program share index, channels and masks,
and rows of q, k, v are read where projections leave them, [B, N, H, D]. Products have columns in eights and most D
leave one free: v gets ones there, and the sum of p, as it is rounded for the product, comes out of it. Dropout drops
from the product alone, and sums p itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.forward import Running, read_softmax, write_softmax
from megagraph.kernels.heads import HeadRows, heads_ptrs, hide_of_heads, load_heads, planes_ptrs
from megagraph.kernels.tile import (
    REST,
    Keys,
    Queries,
    add_dot,
    bucket_tile,
    dot,
    log_sum_exp,
    loop,
    online_softmax,
    segment,
)


@triton.jit
def _scores(x, qk, queries, keys, offs_n, bucket, MASKED: tl.constexpr):
    """``tile.scores`` of several heads, [GROUP, BLOCK_M, BLOCK_N], which share index, channels and masks."""
    in_cols = offs_n < keys.left
    inside = queries.inside[:, None] & in_cols[None, :]
    s = qk * x.scale
    if x.FORM == "dense":
        ptrs = planes_ptrs(x, x.learned, queries, keys, offs_n)
        values = tl.load(ptrs, mask=inside[None, :, :], other=0.0) if MASKED else tl.load(ptrs)
        s += values.to(x.ACC_DTYPE)
    elif x.FORM == "bucket":
        if bucket is None:
            bucket = bucket_tile(x, queries, keys, offs_n, inside, MASKED)
        # in memory [TABLE_SIZE, HEADS]: one address for all heads of a pair
        s += tl.load(x.learned.ptr + bucket.to(tl.int32)[None, :, :] * x.HEADS + queries.h[:, None, None])
    return hide_of_heads(x, s, queries, keys, offs_n, in_cols, MASKED)


@triton.jit
def _fold_tile(x, running, q, queries, keys, bucket, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Fold keys into the running softmax; ``bucket``, if it is loaded already."""
    b, heads = queries.b, tl.minimum(queries.h, x.H - 1)
    offs_n = tl.arange(0, BLOCK_N)
    of_keys = HeadRows(b, heads, keys.start, offs_n)
    k = load_heads(x, x.k, of_keys, keys.left, MASKED)
    beyond = tl.where((tl.arange(0, x.BLOCK_V) == x.D) & x.ONES, 1.0, 0.0).to(x.v.ptr.dtype.element_ty)
    v = load_heads(x, x.v, of_keys, keys.left, MASKED, beyond[None, None, :])
    qk = dot(x, q, tl.permute(k, (0, 2, 1)))
    s = _scores(x, qk, queries, keys, offs_n, bucket, MASKED)
    m, p, rescale = online_softmax(x, running.m, s)
    l = running.l
    if not x.ONES:
        l = l * rescale + tl.sum(p, axis=2, keep_dims=True)
    if x.THRESHOLD > 0:  # kept p is scaled once, in out
        p = tl.where(dropped(x, queries.keys[:, :, None], (keys.col + offs_n)[None, None, :]), 0.0, p)
    return Running(m, l, add_dot(x, running.acc * rescale, p, v))


@triton.jit
def _fold_segment(x, running, q, queries, i, BLOCK_N: tl.constexpr):
    """Fold the keys of a segment.

    Buckets are loaded a tile ahead: a load of bytes just before a product makes the compiler arrange its operands for
    bytes.
    """
    key_start, column_start, length, _ = segment(x, i)
    whole = length // BLOCK_N * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    ahead = None
    if x.FORM == "bucket":
        keys = Keys(None, None, key_start, column_start, column_start, length)
        ahead = bucket_tile(x, queries, keys, offs_n, queries.inside[:, None] & (offs_n < whole)[None, :], True)
    for start in loop(0, whole, BLOCK_N):
        bucket = ahead
        if x.FORM == "bucket":
            col = column_start + tl.minimum(start + BLOCK_N, whole - BLOCK_N)
            ahead = bucket_tile(x, queries, Keys(None, None, key_start, col, col, length), offs_n, None, False)
        col = column_start + start
        keys = Keys(None, None, key_start + start, col, col, length - start)
        running = _fold_tile(x, running, q, queries, keys, bucket, BLOCK_N, False)
    for start in loop(whole, length, REST):
        col = column_start + start
        keys = Keys(None, None, key_start + start, col, col, length - start)
        running = _fold_tile(x, running, q, queries, keys, None, REST, True)
    return running


@triton.jit
def narrow_fwd(
    x, softmax, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_tiles * groups of heads); one program owns BLOCK_M query rows of GROUP heads.

    Heads and rows that do not exist repeat the last one, and are not stored.
    """
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    groups = x.HEADS // GROUP
    b = pid // groups // num_tiles
    row = pid // groups % num_tiles * BLOCK_M
    offs_h = pid % groups * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)
    state = (b * x.H + heads)[:, None, None] * x.M + (row + offs_m)[None, :, None]
    in_state = (offs_h < x.H)[:, None, None] & in_rows[None, :, None]
    offs_d = tl.arange(0, x.BLOCK_V)[None, None, :]
    in_acc = in_state & (offs_d < x.D)

    of_rows = HeadRows(b, heads, row, offs_m)
    q = load_heads(x, x.q, of_rows, x.M, False)
    running = read_softmax(x, softmax, state, offs_d, in_state, in_acc, FIRST)
    if x.ONES and not FIRST:
        running = Running(running.m, running.l, tl.where(offs_d == x.D, running.l, running.acc))

    keys = row_keys(x, b, heads[:, None], (row + offs_m)[None, :])
    queries = Queries(b, offs_h, row, offs_m, in_rows, keys)
    for i in loop(0, x.num_segments, 1):
        running = _fold_segment(x, running, q, queries, i, BLOCK_N)

    m, l, acc = running
    if x.ONES:
        l = tl.sum(tl.where(offs_d == x.D, acc, 0.0), axis=2, keep_dims=True)
    if LAST:
        lse, l_safe = log_sum_exp(x, m, l)
        tl.store(softmax.lse + state, lse, mask=in_state)
        ptrs = heads_ptrs(x, softmax.out, of_rows, x.BLOCK_V)
        tl.store(ptrs, acc * (x.KEEP_SCALE / l_safe), mask=in_acc)
    else:
        write_softmax(x, softmax, state, offs_d, in_state, in_acc, Running(m, l, acc))
