"""One ring step of exact attention with an additive graph bias, backward (FlashAttention, arXiv:2205.14135, Alg. 4).

    p = exp(s - lse),  dp = d_out v^T              scores recomputed; the caller gives delta = sum(d_out * out) - d_lse
    ds = p * (dp - delta)
    dk = scale * ds^T q,  dv = p^T d_out           by ``key_pass``, which writes ds
    dq = scale * ds k                              by ``query_pass``, which reads it
    db = ds                                        dense; summed over pairs for a table or a projection

With dropout, kept p and dp are scaled by 1 / (1 - dropout_p) and dropped ones are zero.

ds is in memory, rounded as an operand of a product is, for as many keys at a time as fill the device (the gradient of
a dense bias is ds itself): to read it takes less time than to compute it again. What is made of a table's or a
projection's reads it, too (``learned``). No atomics: every sum has one order, and two runs agree.
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
    dot,
    exp,
    find_keys,
    head_ptr,
    load_lse,
    load_rows,
    loop,
    readable,
    scores,
    segment,
    tile_ptrs,
    write_rows,
)


@triton.jit
def row_delta(d_out, out, d_lse_ptr, delta_ptr, num_rows, H, M, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta = sum(d_out * out) - d_lse, if any, of BLOCK_M rows, those of all heads one after another; grid (cdiv(rows,
    BLOCK_M))."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    flat = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = flat // M
    b, h, row, exists = bh // H, bh % H, flat % M, flat < num_rows
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    inside = exists[:, None] & (offs_d < D)
    product = tl.full([BLOCK_M, BLOCK_D], 1.0, delta_ptr.dtype.element_ty)
    for i in tl.static_range(2):
        t = d_out if i == 0 else out
        ptrs = t.ptr + (b * t.strides[0] + h * t.strides[1] + row * t.strides[2])[:, None] + offs_d * t.strides[3]
        product *= tl.load(ptrs, mask=inside, other=0.0).to(product.dtype)
    delta = tl.sum(product, axis=1)
    if d_lse_ptr is not None:
        delta -= tl.load(d_lse_ptr + flat, mask=exists, other=0.0)
    tl.store(delta_ptr + flat, delta, mask=exists)


@triton.jit
def _key_tile(
    x, dk, dv, k, v, saved, ds_out, q_ptr, d_out_ptr, b, h, row, keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the share of the queries at row.. to dk and dv of the keys k and v, and write ds.

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
    in_cols = offs_n < keys.left
    s = scores(x, dot(x, q, tl.trans(k)), queries, keys, offs_n, in_cols, MASKED)
    p = exp(x, s, lse)
    dp = dot(x, do, tl.trans(v))
    p_kept = p
    if x.THRESHOLD > 0:  # kept p is scaled once, in dv
        row_key = row_keys(x, b, h, tl.minimum(row + offs_m, x.M - 1))
        drop = dropped(x, row_key[:, None], (keys.col + offs_n)[None, :])
        p_kept = tl.where(drop, 0.0, p)
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    dv = add_dot(x, dv, tl.trans(p_kept.to(do.dtype)), do)
    ds = (p * (dp - delta)).to(q.dtype)  # 0 for a masked pair, whose p is 0
    ptrs = tile_ptrs(x, ds_out, b, h, row, offs_m, keys.place, offs_n)
    if MASKED and PADDED:
        tl.store(ptrs, ds, mask=in_rows[:, None])
    elif MASKED:
        tl.store(ptrs, ds, mask=in_rows[:, None] & in_cols[None, :])
    else:
        tl.store(ptrs, ds)
    return add_dot(x, dk, tl.trans(ds), q), dv


@triton.jit
def key_pass(
    x, saved, dk_out, dv_out, ds, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dk, dv and ds of at most BLOCK_N keys of one head, over all queries; PADDED: planes of ds have room for whole
    tiles, and get zeros there. Grid (B * num_tiles * H); heads vary fastest, as in forward."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % x.H
    b = pid // x.H // num_tiles
    start, col, place, left = find_keys(x, pid // x.H % num_tiles, BLOCK_N)
    keys = Keys(None, None, start, col, place, left)
    offs_n = tl.arange(0, BLOCK_N)
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
                x, dk, dv, k, v, saved, ds, q_ptr, d_out_ptr, b, h, row, keys,
                REST if MASKED else BLOCK_M, BLOCK_N, PADDED, MASKED,
            )  # fmt: skip
    write_rows(x, dk_out, (b, h, start), offs_n, left, dk * x.scale, ACCUMULATE)
    write_rows(x, dv_out, (b, h, start), offs_n, left, dv * x.KEEP_SCALE, ACCUMULATE)


@triton.jit
def query_pass(
    x, ds, dq_out, total, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """dq of BLOCK_M queries of one head; what other keys gave stands in ``total`` [B, H, M, D] unless FIRST, and goes
    there unless LAST. Grid (B * num_tiles * H)."""
    pid = tl.program_id(0).to(tl.int64)
    h = pid % x.H
    b = pid // x.H // num_tiles
    row = pid // x.H % num_tiles * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    near_m = tl.minimum(offs_m, x.M - 1 - row).to(tl.int32)  # rows beyond M repeat the last one, and are not written
    offs_d = tl.arange(0, x.BLOCK_D)[None, :]
    exists = (offs_m < x.M - row)[:, None] & (offs_d < x.D)
    so_far = ((b * x.H + h) * x.M + row) * x.D + (offs_m[:, None] * x.D + offs_d)
    dq = tl.zeros([BLOCK_M, x.BLOCK_D], x.ACC_DTYPE)
    if not FIRST:
        dq += tl.load(total + so_far, mask=exists, other=0.0)
    k_ptr = head_ptr(x, x.k, b, h)
    for i in loop(0, x.num_segments, 1):
        key_start, _, length, place = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            offs_n = tl.arange(0, REST if MASKED else BLOCK_N)
            for start in loop(
                whole if MASKED else 0,
                length if MASKED else whole,
                REST if MASKED else BLOCK_N,
                num_stages=1 if MASKED else None,
            ):
                left = length - start
                k = load_rows(x, x.k, k_ptr, key_start + start, offs_n, left, MASKED)
                ptrs = tile_ptrs(x, ds, b, h, row, near_m, place + start, offs_n)
                of_keys = tl.load(ptrs, mask=(offs_n < left)[None, :], other=0.0) if MASKED else tl.load(ptrs)
                dq = add_dot(x, dq, readable(of_keys), k)
    if LAST:
        write_rows(x, dq_out, (b, h, row), offs_m, x.M - row, dq * x.scale, ACCUMULATE)
    else:
        tl.store(total + so_far, dq, mask=exists)


@triton.jit
def plane_pass(
    x, ds, db, key_tiles, num_tiles, group_b, group_h,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """db of a dense plane that group_b sequences and group_h heads share: the sum of their ds. Grid (planes *
    num_tiles * key_tiles); columns of db [., ., M, N] are those of the bias."""
    pid = tl.program_id(0).to(tl.int64)
    _, col, place, left = find_keys(x, pid % key_tiles, BLOCK_N)
    row = pid // key_tiles % num_tiles * BLOCK_M
    plane = pid // key_tiles // num_tiles
    planes_h = x.H // group_h
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    exists = (offs_m < x.M - row)[:, None] & (offs_n < left)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], x.ACC_DTYPE)
    for g in loop(0, group_b * group_h, 1):
        b = plane // planes_h * group_b + g // group_h
        h = plane % planes_h * group_h + g % group_h
        ptrs = tile_ptrs(x, ds, b, h, row, offs_m, place, offs_n)
        total += tl.load(ptrs, mask=exists, other=0.0).to(x.ACC_DTYPE)
    ptrs = tile_ptrs(x, db, plane // planes_h, plane % planes_h, row, offs_m, col, offs_n)
    tl.store(ptrs, total, mask=exists)
