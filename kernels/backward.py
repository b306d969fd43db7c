"""One ring step of exact attention with an additive graph bias, backward (FlashAttention, arXiv:2205.14135, Alg. 4).

    p = exp(s - lse),  dp = d_out v^T              scores recomputed; the caller gives delta = sum(d_out * out) - d_lse
    ds = p * (dp - delta)
    dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T d_out
    db = ds                                        dense; summed over pairs for a table or a projection

With dropout, kept p and dp are scaled by 1 / (1 - dropout_p) and dropped ones are zero. One launch holds three kinds
of programs. Key programs own keys and give dk and dv; query programs own queries and give dq, db and the gradient of a
projection; table programs (``table_gradient``) give the gradient of a table. No atomics: every sum has one order, and
two runs agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.table_gradient import table_program
from megagraph.kernels.tile import (
    REST,
    Keys,
    Queries,
    add_dot,
    channel_tile,
    dot,
    dropped,
    exp,
    head_ptr,
    load_lse,
    load_rows,
    loop,
    plane_offsets,
    row_keys,
    scores,
    segment,
    write_rows,
)


@triton.jit
def row_delta(d_out, out, d_lse_ptr, delta_ptr, H, M, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta = sum(d_out * out) - d_lse of BLOCK_M rows; grid (B * H * cdiv(M, BLOCK_M))."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    pid = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(M, BLOCK_M)
    bh = pid // num_tiles
    rows = pid % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    d_lse = tl.load(d_lse_ptr + bh * M + rows, mask=rows < M, other=0.0)
    product = tl.full([BLOCK_M, BLOCK_D], 1.0, d_lse.dtype)
    for t in tl.static_range(2):
        x = d_out if t == 0 else out
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        ptrs = x.ptr + bh // H * x.strides[0] + bh % H * x.strides[1]
        ptrs += rows[:, None] * x.strides[2] + offs_d * x.strides[3]
        product *= tl.load(ptrs, mask=(rows < M)[:, None] & (offs_d < D), other=0.0).to(d_lse.dtype)
    tl.store(delta_ptr + bh * M + rows, tl.sum(product, axis=1) - d_lse, mask=rows < M)


@triton.jit
def _key_tile(
    x, dk, dv, k, v, saved, q_ptr, d_out_ptr, b, h, row, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries at row.. to dk and dv of the keys k and v.

    The tile stands as the bias does, queries by keys, and p and ds go through shared memory to be transposed: in 16
    bits, where a transposed bias would be read one element at a time.
    """
    left = x.M - row
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    in_rows = offs_m < left
    q = load_rows(x, x.q, q_ptr, row, offs_m, left, MASKED)
    do = load_rows(x, saved.d_out, d_out_ptr, row, offs_m, left, MASKED)
    stat = (b * x.H + h) * x.M + row + offs_m
    lse = load_lse(x, saved.lse, stat, in_rows if MASKED else None)
    delta = tl.load(saved.delta + stat, mask=in_rows, other=0.0) if MASKED else tl.load(saved.delta + stat)
    delta = delta[:, None]

    queries = Queries(b, h, row, offs_m, in_rows, None)
    s = scores(x, dot(x, q, tl.trans(k)), queries, keys, offs_n, offs_n < keys.left, MASKED)
    p = exp(x, s, lse)
    dp = dot(x, do, tl.trans(v))
    p_kept = p
    if x.THRESHOLD > 0:  # kept p is scaled once, in dv
        row_key = row_keys(x, b, h, tl.minimum(row + offs_m, x.M - 1))
        drop = dropped(x, row_key[:, None], (keys.col + offs_n)[None, :])
        p_kept = tl.where(drop, 0.0, p)
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    dv = add_dot(dv, tl.trans(p_kept.to(do.dtype)), do)
    ds = p * (dp - delta)
    return add_dot(dk, tl.trans(ds.to(q.dtype)), q), dv


@triton.jit
def _key_program(
    x, saved, dk_out, dv_out, b, h, start, col, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dk, dv of ``left`` <= BLOCK_N keys at start.., over all queries."""
    offs_n = tl.arange(0, BLOCK_N)
    keys = Keys(None, None, start, col, left)
    k = load_rows(x, x.k, head_ptr(x, x.k, b, h), start, offs_n, left, True)
    v = load_rows(x, x.v, head_ptr(x, x.v, b, h), start, offs_n, left, True)
    q_ptr = head_ptr(x, x.q, b, h)
    d_out_ptr = head_ptr(x, saved.d_out, b, h)
    dk = tl.zeros([BLOCK_N, x.BLOCK_D], x.ACC_DTYPE)
    dv = tl.zeros([BLOCK_N, x.BLOCK_D], x.ACC_DTYPE)
    # in 64 bits, as a row is multiplied by strides
    whole = tl.where(left < BLOCK_N, 0, x.M // BLOCK_M * BLOCK_M).to(tl.int64)
    for MASKED in tl.static_range(2):
        for row in loop(whole if MASKED else 0, x.M if MASKED else whole, REST if MASKED else BLOCK_M):
            dk, dv = _key_tile(
                x, dk, dv, k, v, saved, q_ptr, d_out_ptr, b, h, row, keys,
                REST if MASKED else BLOCK_M, BLOCK_N, MASKED,
            )  # fmt: skip
    write_rows(x, dk_out, (b, h, start), offs_n, left, dk * x.scale, ACCUMULATE)
    write_rows(x, dv_out, (b, h, start), offs_n, left, dv * x.KEEP_SCALE, ACCUMULATE)


@triton.jit
def _query_tile(
    x, dq, sums, q, do, lse, delta, queries, keys, d_learned,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys to dq; write db, or add to the projection's sums [BLOCK_M, BLOCK_C]."""
    b, row, offs_m, col = queries.b, queries.row, queries.offs, keys.col
    offs_n = tl.arange(0, BLOCK_N)
    in_cols = offs_n < keys.left
    k = load_rows(x, x.k, keys.k, keys.start, offs_n, keys.left, MASKED)
    v = load_rows(x, x.v, keys.v, keys.start, offs_n, keys.left, MASKED)
    s = scores(x, dot(x, q, tl.trans(k)), queries, keys, offs_n, in_cols, MASKED)
    p = exp(x, s, lse)
    dp = dot(x, do, tl.trans(v))
    if x.THRESHOLD > 0:
        dp = tl.where(dropped(x, queries.keys[:, None], (col + offs_n)[None, :]), 0.0, dp * x.KEEP_SCALE)
    ds = p * (dp - delta)  # 0 for a masked pair, whose p is 0
    dq = add_dot(dq, ds, k)
    inside = queries.inside[:, None] & in_cols[None, :] if MASKED else queries.inside[:, None]
    if d_learned is not None and x.FORM == "dense":
        stride_b, stride_h, stride_m, stride_n = d_learned.strides
        offsets = plane_offsets(x, stride_m, stride_n, offs_m, offs_n)
        ptrs = (d_learned.ptr + b * stride_b + queries.h * stride_h + row * stride_m + col * stride_n) + offsets
        db = ds
        if SHARED:  # by the heads of this program, one after another
            db += tl.load(ptrs, mask=inside, other=0.0)
        tl.store(ptrs, db, mask=inside)
    elif d_learned is not None and x.FORM == "projected":
        offs_c = tl.arange(0, BLOCK_C)[None, :]
        for c in tl.static_range(x.NUM_CHANNELS):
            channel = channel_tile(x, c, queries, keys, offs_n, inside, MASKED)
            sums += tl.where(offs_c == c, tl.sum(ds * channel, axis=1, keep_dims=True), 0.0)
    return dq, sums


@triton.jit
def _query_program(
    x, saved, dq_out, d_learned, b, h, tile, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, SHARED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head, over all keys, and their share of a dense or projected bias's gradient."""
    row = tile * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)  # rows beyond M repeat the last one, with p = 0
    q = load_rows(x, x.q, head_ptr(x, x.q, b, h), row, offs_m, x.M, False)
    do = load_rows(x, saved.d_out, head_ptr(x, saved.d_out, b, h), row, offs_m, x.M, False)
    stat = (b * x.H + h) * x.M + row + offs
    lse = load_lse(x, saved.lse, stat, in_rows)
    delta = tl.load(saved.delta + stat, mask=in_rows, other=0.0)[:, None]
    queries = Queries(b, h, row, offs_m, in_rows, row_keys(x, b, h, row + offs_m))
    k_ptr = head_ptr(x, x.k, b, h)
    v_ptr = head_ptr(x, x.v, b, h)
    dq = tl.zeros([BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    sums = tl.zeros([BLOCK_M, BLOCK_C], x.ACC_DTYPE)
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            for start in loop(whole if MASKED else 0, length if MASKED else whole, REST if MASKED else BLOCK_N):
                keys = Keys(k_ptr, v_ptr, key_start + start, column_start + start, length - start)
                dq, sums = _query_tile(
                    x, dq, sums, q, do, lse, delta, queries, keys, d_learned,
                    REST if MASKED else BLOCK_N, BLOCK_C, SHARED, MASKED,
                )  # fmt: skip
    write_rows(x, dq_out, (b, h, row), offs, x.M - row, dq * x.scale, ACCUMULATE)
    if d_learned is not None and x.FORM == "projected":  # partial sums [B, H, num_tiles, C]
        offs_c = tl.arange(0, BLOCK_C)
        ptrs = d_learned.ptr + ((b * x.H + h) * num_tiles + tile) * x.NUM_CHANNELS + offs_c
        tl.store(ptrs, tl.sum(sums, axis=0), mask=offs_c < x.NUM_CHANNELS)


@triton.jit
def step_bwd(
    x, saved, dq, dk, dv, d_learned, programs,
    KEY_M: tl.constexpr, KEY_N: tl.constexpr, QUERY_M: tl.constexpr, QUERY_N: tl.constexpr, BLOCK_C: tl.constexpr,
    TABLE_H: tl.constexpr, TABLE_M: tl.constexpr, TABLE_N: tl.constexpr, BLOCK_R: tl.constexpr,
    SHARED: tl.constexpr, ACCUMULATE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (programs.key + programs.query + table programs); heads vary fastest, as in forward.

    A key program owns one key tile of one head. A query program owns one query tile of one bias plane, which
    group_b * group_h heads share: one, unless the gradient of a broadcast dense plane is wanted.
    """
    pid = tl.program_id(0).to(tl.int64)
    if pid < programs.key:
        h = pid % x.H
        tile = pid // x.H % programs.key_tiles
        b = pid // x.H // programs.key_tiles
        key = tile * 0
        col = tile * 0
        left = 0
        for i in loop(0, x.num_segments, 1):  # find the segment that holds this tile
            key_start, column_start, length = segment(x, i)
            start = tile * KEY_N
            here = (start >= 0) & (start < length)
            key = tl.where(here, key_start + start, key)
            col = tl.where(here, column_start + start, col)
            left = tl.where(here, tl.minimum(length - start, KEY_N), left).to(tl.int32)
            tile -= tl.cdiv(length, KEY_N)
        col = tl.multiple_of(col, x.COLUMN_ALIGNMENT)
        _key_program(x, saved, dk, dv, b, h, key, col, left, KEY_M, KEY_N, ACCUMULATE)
    elif pid < programs.key + programs.query:
        pid -= programs.key
        planes_h = x.H // programs.group_h
        plane_h = pid % planes_h
        tile = pid // planes_h % programs.query_tiles
        plane_b = pid // planes_h // programs.query_tiles
        for g in loop(0, programs.group_b * programs.group_h, 1):
            b = plane_b * programs.group_b + g // programs.group_h
            h = plane_h * programs.group_h + g % programs.group_h
            _query_program(
                x, saved, dq, d_learned, b, h, tile, programs.query_tiles,
                QUERY_M, QUERY_N, BLOCK_C, SHARED, ACCUMULATE,
            )  # fmt: skip
            if SHARED:
                tl.debug_barrier()  # the next head reads what this one added to the plane's gradient
    elif d_learned is not None and x.FORM == "bucket":
        pid -= programs.key + programs.query
        groups = tl.cdiv(x.H, TABLE_H)
        b = pid // groups // programs.table_tiles
        group = pid % groups
        tile = pid // groups % programs.table_tiles
        table_program(
            x, saved, d_learned, b, group, tile, programs.table_tiles, TABLE_H, TABLE_M, TABLE_N, BLOCK_R, WARPS
        )
