"""Attention over short sequences, forward and backward: one program holds several heads of a sequence.

The equations are those of ``forward`` and ``backward``, all keys in one step. Heads of a program share index, channels
and masks, and rows of q, k, v are read whole where projections leave them, [B, N, H, D]. Backward is a single pass:
a program owns its heads, so dq needs no second look at the scores; it adds up in memory, key tile by key tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.table_gradient import add_one_hot
from megagraph.kernels.tile import (
    Keys,
    Queries,
    add_dot,
    bucket_tile,
    channel_tile,
    dot,
    dropped,
    exp,
    heads_ptrs,
    load_heads,
    load_lse,
    log_sum_exp,
    loop,
    online_softmax,
    planes_ptrs,
    row_keys,
    scores_of_heads,
)


@triton.jit
def short_fwd(
    x, out, lse_ptr, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_tiles * cdiv(H, GROUP)); one program owns BLOCK_M query rows of GROUP heads.

    MASKED: the tiles overrun M or N.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(x.H, GROUP)
    b = pid // groups // num_tiles
    row = pid // groups % num_tiles * BLOCK_M
    offs_h = pid % groups * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, and are not stored
    offs_m = tl.arange(0, BLOCK_M)
    in_rows = offs_m < x.M - row
    q = load_heads(x, x.q, b, heads, row, offs_m, x.M - row, MASKED)
    row_key = row_keys(x, b, heads[:, None], tl.minimum(row + offs_m, x.M - 1)[None, :])
    queries = Queries(b, heads, row, offs_m, in_rows, row_key)
    m = tl.full([GROUP, BLOCK_M, 1], -float("inf"), x.ACC_DTYPE)
    l = tl.zeros([GROUP, BLOCK_M, 1], x.ACC_DTYPE)
    acc = tl.zeros([GROUP, BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    for col in loop(0, x.Nk, BLOCK_N):
        offs_n = tl.arange(0, BLOCK_N)
        k = load_heads(x, x.k, b, heads, col, offs_n, x.Nk - col, MASKED)
        v = load_heads(x, x.v, b, heads, col, offs_n, x.Nk - col, MASKED)
        qk = dot(x, q, tl.permute(k, (0, 2, 1)))
        in_cols = offs_n < x.Nk - col
        keys = Keys(None, None, col, col, x.Nk - col)
        s = scores_of_heads(x, qk, queries, keys, offs_n, in_cols, MASKED)
        m, l, p, rescale = online_softmax(x, m, l, s)
        if x.THRESHOLD > 0:  # kept p is scaled once, in out
            p = tl.where(dropped(x, row_key[:, :, None], (col + offs_n)[None, None, :]), 0.0, p)
        acc = add_dot(acc * rescale, p, v)
    lse, l_safe = log_sum_exp(x, m, l)
    exists = (offs_h < x.H)[:, None, None] & in_rows[None, :, None]
    stat = (b * x.H + heads)[:, None, None] * x.M + (row + offs_m)[None, :, None]
    tl.store(lse_ptr + stat, lse, mask=exists)
    in_d = (tl.arange(0, x.BLOCK_D) < x.D)[None, None, :]
    ptrs = heads_ptrs(x, out, b, heads, row, offs_m)
    tl.store(ptrs, acc * (x.KEEP_SCALE / l_safe), mask=exists & in_d)


@triton.jit
def _write_sum(t, i, numbers, AXIS: tl.constexpr):
    """t[i] = sum of numbers [., ., COLUMNS] over its first or second axis; t [..., ROWS, COLUMNS] is contiguous."""
    ROWS: tl.constexpr = numbers.shape[1 - AXIS]
    COLUMNS: tl.constexpr = numbers.shape[2]
    ptrs = t.ptr + (i * ROWS + tl.arange(0, ROWS)[:, None]) * COLUMNS
    tl.store(ptrs + tl.arange(0, COLUMNS)[None, :], tl.sum(numbers, axis=AXIS))


@triton.jit
def short_bwd(
    x, saved, dq, dk, dv, d_learned,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    MASKED: tl.constexpr, ONE_TILE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (B * cdiv(H, GROUP)); one program owns GROUP heads of a sequence.

    ONE_TILE: all keys are in one tile, and dq is written once, in its own dtype; else it adds up in fp32.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(x.H, GROUP)
    b = pid // groups
    offs_h = pid % groups * GROUP + tl.arange(0, GROUP)
    heads = tl.minimum(offs_h, x.H - 1)  # heads beyond H repeat the last one, with p = 0
    in_heads = (offs_h < x.H)[:, None]
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    in_d = (tl.arange(0, x.BLOCK_D) < x.D)[None, None, :]
    table = tl.zeros([WARPS, BLOCK_R, GROUP], x.ACC_DTYPE)
    sums = tl.zeros([GROUP, BLOCK_M, BLOCK_C], x.ACC_DTYPE)
    for col in loop(0, x.Nk, BLOCK_N):
        in_cols = offs_n < x.Nk - col
        k = load_heads(x, x.k, b, heads, col, offs_n, x.Nk - col, MASKED)
        v = load_heads(x, x.v, b, heads, col, offs_n, x.Nk - col, MASKED)
        dk_tile = tl.zeros([GROUP, BLOCK_N, x.BLOCK_D], x.ACC_DTYPE)
        dv_tile = tl.zeros([GROUP, BLOCK_N, x.BLOCK_D], x.ACC_DTYPE)
        for row in loop(0, x.M, BLOCK_M):
            in_rows = offs_m < x.M - row
            exists = in_heads & in_rows[None, :]
            stat = (b * x.H + heads)[:, None] * x.M + (row + offs_m)[None, :]
            lse = load_lse(x, saved.lse, stat, exists)
            delta = tl.load(saved.delta + stat, mask=exists, other=0.0)[:, :, None]
            q = load_heads(x, x.q, b, heads, row, offs_m, x.M - row, MASKED)
            do = load_heads(x, saved.d_out, b, heads, row, offs_m, x.M - row, MASKED)
            qk = dot(x, q, tl.permute(k, (0, 2, 1)))
            queries, keys = Queries(b, heads, row, offs_m, in_rows, None), Keys(None, None, col, col, x.Nk - col)
            s = scores_of_heads(x, qk, queries, keys, offs_n, in_cols, MASKED)
            p = exp(x, s, lse)
            dp = dot(x, do, tl.permute(v, (0, 2, 1)))
            p_kept = p
            if x.THRESHOLD > 0:  # kept p is scaled once, in dv
                row_key = row_keys(x, b, heads[:, None], tl.minimum(row + offs_m, x.M - 1)[None, :])
                drop = dropped(x, row_key[:, :, None], (col + offs_n)[None, None, :])
                p_kept = tl.where(drop, 0.0, p)
                dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
            ds = p * (dp - delta)
            ds_low = ds.to(k.dtype)
            dv_tile = add_dot(dv_tile, tl.permute(p_kept.to(k.dtype), (0, 2, 1)), do)
            dk_tile = add_dot(dk_tile, tl.permute(ds_low, (0, 2, 1)), q)

            dq_tile = dot(x, ds_low, k) * x.scale
            dq_ptrs = heads_ptrs(x, dq, b, heads, row, offs_m)
            keep = exists[:, :, None] & in_d
            if not ONE_TILE:
                dq_tile += tl.load(dq_ptrs, mask=keep & (col > 0), other=0.0)
            tl.store(dq_ptrs, dq_tile, mask=keep)

            inside = in_rows[:, None] & in_cols[None, :]
            if d_learned is not None and x.FORM == "dense":
                ptrs = planes_ptrs(x, d_learned, queries, keys, offs_n)
                tl.store(ptrs, ds, mask=in_heads[:, :, None] & inside[None, :, :])
            elif d_learned is not None and x.FORM == "bucket":
                bucket = bucket_tile(x, queries, keys, offs_n, inside, MASKED)
                table = add_one_hot(table, bucket, ds_low, WARPS)
            elif d_learned is not None and x.FORM == "projected":
                offs_c = tl.arange(0, BLOCK_C)[None, None, :]
                for c in tl.static_range(x.NUM_CHANNELS):
                    channel = channel_tile(x, c, queries, keys, offs_n, inside, MASKED)
                    total = tl.sum(ds * channel[None, :, :], axis=2, keep_dims=True)
                    sums += tl.where(offs_c == c, total, 0.0)
        keep = in_heads[:, :, None] & in_cols[None, :, None] & in_d
        tl.store(heads_ptrs(x, dk, b, heads, col, offs_n), dk_tile * x.scale, mask=keep)
        tl.store(heads_ptrs(x, dv, b, heads, col, offs_n), dv_tile * x.KEEP_SCALE, mask=keep)
        if not ONE_TILE:
            tl.debug_barrier()  # the next key tile reads what this one added to dq
    if d_learned is not None and x.FORM == "bucket":  # partial sums [B, groups, BLOCK_R, GROUP]
        _write_sum(d_learned, pid, table, 0)
    elif d_learned is not None and x.FORM == "projected":  # partial sums [B, groups, GROUP, BLOCK_C]
        _write_sum(d_learned, pid, sums, 1)
