"""Attention over listed pairs, backward: p, dp and ds of ``backward`` anew, in tiles of rows and in tiles of keys.

``rows_bwd`` gives dq and the gradient of the bias, ``keys_bwd`` dk and dv.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.dropout import row_keys
from megagraph.kernels.heads import HeadRows, load_heads, write_heads
from megagraph.kernels.learned import add_learned, one_hot
from megagraph.kernels.pairs import (
    add_heads_dot,
    block_tiles,
    first_tile,
    heads_dot,
    hide,
    hide_columns,
    is_dropped,
    list_segment,
    load_tile,
    pair_scores,
    program_of,
    segment_tiles,
)
from megagraph.kernels.tile import exp, load_lse, loop, pivot_of


@triton.jit
def _learned_factor(x, number, codes, WARPS: tl.constexpr, ROWS: tl.constexpr, dtype: tl.constexpr):
    """What ds is multiplied with for the gradient of a table, or of a projection, [WARPS, ROWS, pairs of a warp]."""
    if x.FORM == "bucket":
        return one_hot(x, number, codes, WARPS, dtype)
    else:
        offs_c = tl.arange(0, ROWS)[None, None, :]
        ptrs = x.data.ptr + (number.to(tl.int64) * x.data.strides[0])[:, :, None] + offs_c * x.data.strides[1]
        channels = tl.load(ptrs, mask=(number >= 0)[:, :, None] & (offs_c < x.NUM_CHANNELS), other=0.0).to(dtype)
        PAIRS: tl.constexpr = number.shape[0] * number.shape[1] // WARPS
        return tl.permute(tl.reshape(channels, [WARPS, PAIRS, ROWS]), (0, 2, 1))


@triton.jit
def _row_tile(x, walk, sums, rows, at, keys, codes, visited, place, d_pairs, SUMS: tl.constexpr):
    """Add the share of a tile's pairs to dq and the gradient of the bias."""
    dq, d_learned = sums
    q, do, pivot, delta = rows
    key_start, column_start, length = place
    visited = hide_columns(x, walk, at.b, visited, column_start, length)
    key = visited.other - column_start + key_start
    of_keys = HeadRows(at.b, at.heads, 0, key)
    k = load_heads(x, x.k, of_keys, 0, False)
    v = load_heads(x, x.v, of_keys, 0, False)
    p = exp(x, pair_scores(x, heads_dot(x, q, tl.permute(k, (0, 2, 1))), at.heads, visited.number), pivot)
    dp = heads_dot(x, do, tl.permute(v, (0, 2, 1)))
    if x.THRESHOLD > 0:
        drop = is_dropped(x, walk, keys[:, :, None], visited.other[None, None, :])
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    ds = p * (dp - delta)  # 0 where there is no pair, whose p is 0
    if d_pairs is not None:
        ptrs = d_pairs.ptr + (visited.number.to(tl.int64) * d_pairs.strides[0])[None, :, :]
        ptrs += (at.heads * d_pairs.strides[1])[:, None, None]
        keep = (visited.number >= 0)[None, :, :] & at.in_heads[:, None, None]
        tl.store(ptrs, ds + tl.load(ptrs, mask=keep, other=0.0), mask=keep)
    if SUMS:
        factor = _learned_factor(x, visited.number, codes, d_learned.shape[0], d_learned.shape[1], k.dtype)
        d_learned = add_learned(x, d_learned, factor, ds.to(k.dtype))
    return add_heads_dot(x, dq, ds, k), d_learned


@triton.jit
def rows_bwd(
    x, walk, saved, dq_out, d_pairs, partials, at_once,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WARPS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq, what is added to d_pairs [P, H], and partial gradients of a table or a projection, [programs, groups, GROUP,
    BLOCK_R]. Grid (programs * groups); each owns ``at_once`` of the blocks of all sequences, one after another. The
    same block of all sequences follow each other, as they may add to the same pairs.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = x.HEADS // GROUP
    start = pid // groups * at_once
    offs = tl.arange(0, BLOCK_M)
    SUMS: tl.constexpr = BLOCK_R > 0
    codes = None
    if SUMS and x.FORM == "bucket":
        codes = tl.load(x.codes + tl.arange(0, BLOCK_R))[None, :, None]  # loaded once, as in ``learned``
    d_learned = tl.zeros([WARPS, BLOCK_R, GROUP] if SUMS else [1, 1, 1], x.ACC_DTYPE)
    for item in loop(start, tl.minimum(start + at_once, walk.blocks * walk.B), 1):
        at = program_of(x, item % walk.B, pid % groups, GROUP)
        block = item // walk.B
        row = block * BLOCK_M
        offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)  # rows beyond M repeat the last one, without pairs
        exist = at.in_heads[:, None] & (offs < x.M - row)[None, :]
        stat = (at.b * x.H + at.heads)[:, None] * x.M + row + offs_m[None, :]
        of_rows = HeadRows(at.b, at.heads, row, offs_m)
        q = load_heads(x, x.q, of_rows, x.M, False)
        do = load_heads(x, saved.d_out, of_rows, x.M, False)
        delta = tl.load(saved.delta + stat, mask=exist, other=0.0)[:, :, None]
        rows = (q, do, load_lse(x, saved.lse, stat, exist), delta)
        keys = row_keys(x, at.b, at.heads[:, None], (row + offs_m)[None, :])
        dq = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
        begin, end = block_tiles(walk, at.b, block)
        for i in loop(0, x.num_segments, 1):
            key_start, column_start, length = list_segment(x, i)
            first, last = segment_tiles(walk, begin, end, column_start, length, BLOCK_N)
            ahead = first_tile(walk, first, last, BLOCK_M, BLOCK_N)
            for tile in loop(first, last, 1):
                visited = ahead
                ahead = load_tile(walk, tl.minimum(tile + 1, last - 1), BLOCK_M, BLOCK_N)
                dq, d_learned = _row_tile(
                    x, walk, (dq, d_learned), rows, at, keys, codes, visited, (key_start, column_start, length),
                    d_pairs, SUMS,
                )  # fmt: skip
        if d_pairs is not None:
            tl.debug_barrier()  # the next sequence reads what this one added
        write_heads(x, dq_out, of_rows, exist, dq * x.scale, ACCUMULATE)
    if SUMS:
        offs_sums = tl.arange(0, BLOCK_R)[:, None] + tl.arange(0, GROUP)[None, :] * BLOCK_R
        tl.store(partials + pid * (BLOCK_R * GROUP) + offs_sums, tl.sum(d_learned, axis=0))


@triton.jit
def _key_tile(x, walk, saved, dk, dv, k, v, at, ids, visited, seen):
    """Add the share of a tile's queries, which are gathered, to those keys that are ``seen`` [BLOCK_M]."""
    number, row = hide(visited.number, seen[:, None]), visited.other
    of_rows = HeadRows(at.b, at.heads, 0, row)
    q = load_heads(x, x.q, of_rows, 0, False)
    do = load_heads(x, saved.d_out, of_rows, 0, False)
    stat = (at.b * x.H + at.heads)[:, None] * x.M + row[None, :]
    pivot = pivot_of(x, tl.load(saved.lse + stat))[:, None, :]
    delta = tl.load(saved.delta + stat)[:, None, :]
    p = exp(x, pair_scores(x, heads_dot(x, k, tl.permute(q, (0, 2, 1))), at.heads, number), pivot)
    dp = heads_dot(x, v, tl.permute(do, (0, 2, 1)))
    kept = p
    if x.THRESHOLD > 0:  # kept p is scaled once, in dv
        keys = row_keys(x, at.b, at.heads[:, None], row[None, :])
        drop = is_dropped(x, walk, keys[:, None, :], ids)
        kept = tl.where(drop, 0.0, p)
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    dv = add_heads_dot(x, dv, kept, do)
    return add_heads_dot(x, dk, p * (dp - delta), q), dv


@triton.jit
def keys_bwd(
    x, walk, saved, dk_out, dv_out, num_blocks,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dk, dv of a block of BLOCK_M columns of GROUP heads. Grid (B * num_blocks * groups), blocks counted over the
    segments, which may end within one."""
    pid = tl.program_id(0).to(tl.int64)
    groups = x.HEADS // GROUP
    at = program_of(x, pid // groups // num_blocks, pid % groups, GROUP)
    block = (pid // groups % num_blocks).to(tl.int32)
    key_start, column_start, length = block * 0, block * 0, block * 0
    for i in loop(0, x.num_segments, 1):  # the block's own segment, and the block in all columns
        key, column, size = list_segment(x, i)
        blocks = (column + size - 1) // BLOCK_M - column // BLOCK_M + 1
        here = (length == 0) & (block < blocks)
        key_start, column_start = tl.where(here, key, key_start), tl.where(here, column, column_start)
        block = tl.where(here, block + column // BLOCK_M, tl.where(length == 0, block - blocks, block))
        length = tl.where(here, size, length)
    column = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (column >= column_start) & (column < column_start + length)
    column = tl.where(inside, column, column_start)
    seen = inside
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        seen = seen & (tl.load(x.padding.ptr + at.b * stride_b + column * stride_n) == 0)
    key = column - column_start + key_start
    of_keys = HeadRows(at.b, at.heads, 0, key)
    k = load_heads(x, x.k, of_keys, 0, False)
    v = load_heads(x, x.v, of_keys, 0, False)
    dk = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    dv = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    first, last = block_tiles(walk, at.b, block)
    ahead = first_tile(walk, first, last, BLOCK_M, BLOCK_N)
    for tile in loop(first, last, 1):
        visited = ahead
        ahead = load_tile(walk, tl.minimum(tile + 1, last - 1), BLOCK_M, BLOCK_N)
        dk, dv = _key_tile(x, walk, saved, dk, dv, k, v, at, column[None, :, None], visited, seen)
    exist = at.in_heads[:, None] & inside[None, :]
    write_heads(x, dk_out, of_keys, exist, dk * x.scale, ACCUMULATE)
    write_heads(x, dv_out, of_keys, exist, dv * x.KEEP_SCALE, ACCUMULATE)
