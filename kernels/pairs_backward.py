"""Attention over listed pairs, backward: p, dp and ds of ``backward`` anew, by row and by key.

``rows_bwd`` gives dq and the gradient of the bias, ``keys_bwd`` dk and dv.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.halves import equal
from megagraph.kernels.pairs import (
    Visited,
    add_rows,
    is_dropped,
    keys_of,
    list_segment,
    no_sums,
    own_rows,
    pair_scores,
    program_heads,
    row_products,
    row_sums,
    visit_keys,
    visited_rows,
    write_own,
)
from megagraph.kernels.tile import LOG2E, add_dot, exp, find_keys, loop


@triton.jit
def pack_stats(x, lists, lse, delta, BLOCK: tl.constexpr):
    """lse and delta [B, H, M] as ``Lists.stats``, where a visited row finds those of all heads side by side. Grid
    (cdiv(B * M * HEADS, BLOCK))."""
    flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, row, b = flat % x.HEADS, flat // x.HEADS % x.M, flat // x.HEADS // x.M
    exist = (b < lists.B) & (h < x.H)
    place = (b * x.H + h) * x.M + row
    pivot = tl.load(lse + place, mask=exist, other=float("inf"))
    pivot = tl.where(pivot == -float("inf"), float("inf"), pivot)  # met no key: p = 0
    tl.store(lists.stats + 2 * flat, pivot * LOG2E if x.FOLD else pivot, mask=b < lists.B)
    tl.store(lists.stats + 2 * flat + 1, tl.load(delta + place, mask=exist, other=0.0), mask=b < lists.B)


@triton.jit
def _stats(x, lists, heads, rows, exist):
    """Pivot of exp and delta of rows [BLOCK_M, n], [BLOCK_M, n, SLOTS]; p is 0 where they do not exist."""
    row = ((heads.b * x.M + rows) * x.HEADS)[:, :, None] + heads.slots[None, None, :]
    exist = exist[:, :, None] & heads.exist[None, None, :]
    pivot = tl.load(lists.stats + 2 * row, mask=exist, other=float("inf"))
    return pivot, tl.load(lists.stats + 2 * row + 1, mask=exist, other=0.0)


@triton.jit
def _learned_sums(x, lists, sums, ds, visited, dtype: tl.constexpr, BLOCK_R: tl.constexpr):
    """Add to the gradient of a table or a projection, [BLOCK_M, BLOCK_R, SLOTS]."""
    pair, exist = visited.pair.to(tl.int64), visited.exist
    if x.FORM == "bucket":
        here = tl.load(x.data.ptr + pair * x.data.strides[0], mask=exist, other=0).to(tl.int16) | x.CODE
        codes = tl.load(x.codes + tl.arange(0, BLOCK_R))
        here, codes = tl.broadcast(here[:, None, :], codes[None, :, None])
        factor = equal(x, here, codes, dtype)
    else:
        offs_c = tl.arange(0, BLOCK_R)[None, :, None]
        ptrs = x.data.ptr + (pair * x.data.strides[0])[:, None, :] + offs_c * x.data.strides[1]
        factor = tl.load(ptrs, mask=exist[:, None, :] & (offs_c < x.NUM_CHANNELS), other=0.0).to(dtype)
    return add_dot(sums, factor, ds.to(dtype))


@triton.jit
def _row_tile(
    x, lists, saved, sums, q, do, stats, heads, keys, begin, end, at, key_start, column_start, d_pairs,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add the share of pairs at.. of the rows to dq and the gradient of the bias."""
    dq, d_learned = sums
    visited = visit_keys(x, lists, heads, begin, end, at, column_start, BLOCK_N)
    at_keys = Visited(visited.pair, visited.other - column_start + key_start, visited.exist)
    k = visited_rows(x, lists, x.k, heads, at_keys, GROUP)
    v = visited_rows(x, lists, x.v, heads, at_keys, GROUP)
    pivot, delta = stats
    p = exp(x, pair_scores(x, lists, row_products(x, lists, q, k, GROUP), heads, visited), pivot)
    dp = row_products(x, lists, do, v, GROUP)
    if x.THRESHOLD > 0:
        drop = is_dropped(x, lists, keys[:, None, :], visited.other[:, :, None], visited.exist[:, :, None])
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    ds = p * (dp - delta)  # 0 where there is no pair, whose p is 0
    if d_pairs is not None:
        ptrs = d_pairs.ptr + (visited.pair.to(tl.int64) * d_pairs.strides[0])[:, :, None]
        ptrs += heads.slots[None, None, :] * d_pairs.strides[1]
        keep = visited.exist[:, :, None] & heads.exist[None, None, :]
        tl.store(ptrs, ds + tl.load(ptrs, mask=keep, other=0.0), mask=keep)
    if BLOCK_R > 0:
        d_learned = _learned_sums(x, lists, d_learned, ds, visited, k.dtype, BLOCK_R)
    return add_rows(x, lists, dq, ds, k, GROUP), d_learned


@triton.jit
def rows_bwd(
    x, lists, saved, dq_out, d_pairs, partials, num_blocks, at_once,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq, what is added to d_pairs [P, H], and partial gradients of a table or a projection, [programs, groups, GROUP,
    BLOCK_R]. Grid (programs * groups); each owns ``at_once`` of the B * num_blocks blocks of rows, one after another.
    The same rows of all sequences follow each other, as they add to the same pairs.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = x.HEADS // GROUP
    first = pid // groups * at_once
    d_learned = tl.zeros([BLOCK_M, max(BLOCK_R, 1), lists.SLOTS], x.ACC_DTYPE)
    for item in loop(first, tl.minimum(first + at_once, num_blocks * lists.B), 1):
        heads = program_heads(x, lists, item % lists.B, pid % groups, GROUP)
        offs = item // lists.B * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows, row = offs < x.M, tl.minimum(offs, x.M - 1)
        q = own_rows(x, lists, x.q, heads, row, GROUP)
        do = own_rows(x, lists, saved.d_out, heads, row, GROUP)
        stats = _stats(x, lists, heads, row[:, None], in_rows[:, None])
        keys = row_keys(x, heads.b, heads.slots[None, :], row[:, None])
        dq = no_sums(x, lists, BLOCK_M, BLOCK_N, GROUP)
        for i in loop(0, x.num_segments, 1):
            key_start, column_start, length = list_segment(x, i)
            begin, end = keys_of(lists, heads, row, in_rows, column_start, length)
            for at in loop(0, tl.max(end - begin), BLOCK_N):
                dq, d_learned = _row_tile(
                    x, lists, saved, (dq, d_learned), q, do, stats, heads, keys, begin, end, at,
                    key_start, column_start, d_pairs, GROUP, BLOCK_N, BLOCK_R,
                )  # fmt: skip
        if d_pairs is not None:
            tl.debug_barrier()  # the next sequence reads what this one added
        write_own(x, lists, dq_out, heads, row, in_rows, row_sums(lists, dq, GROUP) * x.scale, ACCUMULATE, GROUP)
    if BLOCK_R > 0:
        slot = tl.arange(0, lists.SLOTS)[None, :]
        offs_sums = slot * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
        ptrs = partials + pid * (GROUP * BLOCK_R) + offs_sums
        tl.store(ptrs, tl.sum(d_learned, axis=0), mask=slot < GROUP)


@triton.jit
def _key_tile(
    x, lists, saved, dk, dv, k, v, heads, ids, begin, end, at,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries at.. of the keys' lists."""
    place = (begin + at)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    exist = place < end[:, None]
    row = tl.load(lists.key_rows + place, mask=exist, other=0)
    visited = Visited(tl.load(lists.key_pairs + place, mask=exist, other=0), row, exist)
    q = visited_rows(x, lists, x.q, heads, visited, GROUP)
    do = visited_rows(x, lists, saved.d_out, heads, visited, GROUP)
    pivot, delta = _stats(x, lists, heads, row, exist)
    p = exp(x, pair_scores(x, lists, row_products(x, lists, k, q, GROUP), heads, visited), pivot)
    dp = row_products(x, lists, v, do, GROUP)
    kept = p
    if x.THRESHOLD > 0:  # kept p is scaled once, in dv
        keys = row_keys(x, heads.b, heads.slots[None, None, :], row[:, :, None])
        drop = dropped(x, keys, ids)
        kept = tl.where(drop, 0.0, p)
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    dv = add_rows(x, lists, dv, kept, do, GROUP)
    return add_rows(x, lists, dk, p * (dp - delta), q, GROUP), dv


@triton.jit
def keys_bwd(
    x, lists, saved, dk_out, dv_out, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dk, dv of BLOCK_M keys of GROUP heads. Grid (B * num_tiles * groups), tiles counted over the segments."""
    pid = tl.program_id(0).to(tl.int64)
    groups = x.HEADS // GROUP
    heads = program_heads(x, lists, pid // groups // num_tiles, pid % groups, GROUP)
    start, col, left = find_keys(x, pid // groups % num_tiles, BLOCK_M)
    offs = tl.arange(0, BLOCK_M)
    exist, offs = offs < left, tl.minimum(offs, left - 1)
    key, column = start + offs, col + offs
    listed = exist
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        listed = listed & (tl.load(x.padding.ptr + heads.b * stride_b + column * stride_n) == 0)
    starts = lists.key_starts + (heads.b * lists.columns_apart + column)
    begin = tl.load(starts, mask=listed, other=0).to(tl.int32)
    end = tl.load(starts + 1, mask=listed, other=0).to(tl.int32)
    ids = column
    if lists.column_ids is not None:
        ids = tl.load(lists.column_ids + column)
    ids = ids[:, None, None]
    k = own_rows(x, lists, x.k, heads, key, GROUP)
    v = own_rows(x, lists, x.v, heads, key, GROUP)
    dk = no_sums(x, lists, BLOCK_M, BLOCK_N, GROUP)
    dv = no_sums(x, lists, BLOCK_M, BLOCK_N, GROUP)
    for at in loop(0, tl.max(end - begin), BLOCK_N):
        dk, dv = _key_tile(x, lists, saved, dk, dv, k, v, heads, ids, begin, end, at, GROUP, BLOCK_N)
    write_own(x, lists, dk_out, heads, key, exist, row_sums(lists, dk, GROUP) * x.scale, ACCUMULATE, GROUP)
    write_own(x, lists, dv_out, heads, key, exist, row_sums(lists, dv, GROUP) * x.KEEP_SCALE, ACCUMULATE, GROUP)
