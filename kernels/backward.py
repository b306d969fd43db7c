"""One ring step of exact attention with an additive graph bias, backward (FlashAttention, arXiv:2205.14135, Alg. 4).

    p = exp(s - lse),  dp = d_out v^T              scores recomputed; the caller gives delta = sum(d_out * out) - d_lse
    ds = p * (dp - delta)
    dq = scale * ds k,  dk = scale * ds^T q,  dv = p^T d_out
    db = ds                                        dense; summed over pairs for a table or a projection

With dropout, kept p and dp are scaled by 1 / (1 - dropout_p) and dropped ones are zero. Two launches: programs of
``key_pass`` own keys and give dk and dv, those of ``query_pass`` own queries and give dq and db. Where the gradient of
a table or a projection is wanted, ``learned_pass`` takes the place of the latter. No atomics: every sum has one order,
and two runs agree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.tile import (
    REST,
    Keys,
    Queries,
    add_dot,
    delta_of,
    dot,
    exp,
    find_keys,
    head_ptr,
    load_lse,
    load_rows,
    loop,
    plane_offsets,
    row_products,
    scores,
    segment,
    write_rows,
)


@triton.jit
def row_delta(d_out, out, d_lse_ptr, delta_ptr, H, M, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta = sum(d_out * out) - d_lse, if any, of BLOCK_M rows; grid (B * H * cdiv(M, BLOCK_M))."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    pid = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(M, BLOCK_M)
    bh = pid // num_tiles
    rows = pid % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    place, exists = (bh // H, bh % H, rows), rows < M
    products = row_products(d_out, out, place, exists, D, BLOCK_D, delta_ptr.dtype.element_ty)
    delta = delta_of(products, d_lse_ptr, bh * M + rows, exists)
    tl.store(delta_ptr + bh * M + rows, delta, mask=exists)


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
def key_pass(
    x, saved, dk_out, dv_out, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dk, dv of at most BLOCK_N keys of one head, over all queries. Grid (B * num_tiles * H); heads vary fastest, as in
    forward."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % x.H
    b = pid // x.H // num_tiles
    start, col, left = find_keys(x, pid // x.H % num_tiles, BLOCK_N)
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
        for row in loop(
            whole if MASKED else 0,
            x.M if MASKED else whole,
            REST if MASKED else BLOCK_M,
            num_stages=1 if MASKED else None,
        ):
            dk, dv = _key_tile(
                x, dk, dv, k, v, saved, q_ptr, d_out_ptr, b, h, row, keys,
                REST if MASKED else BLOCK_M, BLOCK_N, MASKED,
            )  # fmt: skip
    write_rows(x, dk_out, (b, h, start), offs_n, left, dk * x.scale, ACCUMULATE)
    write_rows(x, dv_out, (b, h, start), offs_n, left, dv * x.KEEP_SCALE, ACCUMULATE)


@triton.jit
def _query_tile(
    x, dq, q, do, lse, delta, queries, keys, db,
    BLOCK_N: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of the keys to dq; write db."""
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
    if db is not None:
        stride_b, stride_h, stride_m, stride_n = db.strides
        offsets = plane_offsets(x, stride_m, stride_n, offs_m, offs_n)
        ptrs = (db.ptr + b * stride_b + queries.h * stride_h + row * stride_m + col * stride_n) + offsets
        inside = queries.inside[:, None] & in_cols[None, :] if MASKED else queries.inside[:, None]
        total = ds
        if SHARED:  # by the heads of this program, one after another
            total += tl.load(ptrs, mask=inside, other=0.0)
        tl.store(ptrs, total, mask=inside)
    return add_dot(dq, ds, k)


@triton.jit
def _query_program(
    x, saved, dq_out, db, b, h, tile,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq and db of BLOCK_M queries of one head, over all keys."""
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
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            for start in loop(
                whole if MASKED else 0,
                length if MASKED else whole,
                REST if MASKED else BLOCK_N,
                num_stages=1 if MASKED else None,
            ):
                keys = Keys(k_ptr, v_ptr, key_start + start, column_start + start, length - start)
                dq = _query_tile(
                    x, dq, q, do, lse, delta, queries, keys, db, REST if MASKED else BLOCK_N, SHARED, MASKED
                )
    write_rows(x, dq_out, (b, h, row), offs, x.M - row, dq * x.scale, ACCUMULATE)


@triton.jit
def query_pass(
    x, saved, dq, db, num_tiles, group_b, group_h,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHARED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq and db of BLOCK_M queries of one bias plane, which group_b sequences and group_h heads share: one, unless the
    gradient of a broadcast dense plane is wanted. Grid (planes * num_tiles); heads vary fastest."""
    pid = tl.program_id(0).to(tl.int64)
    planes_h = x.H // group_h
    plane_h = pid % planes_h
    tile = pid // planes_h % num_tiles
    plane_b = pid // planes_h // num_tiles
    for g in loop(0, group_b * group_h, 1):
        b = plane_b * group_b + g // group_h
        h = plane_h * group_h + g % group_h
        _query_program(x, saved, dq, db, b, h, tile, BLOCK_M, BLOCK_N, SHARED, ACCUMULATE)
        if SHARED:
            tl.debug_barrier()  # the next head reads what this one added to the plane's gradient
