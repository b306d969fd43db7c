"""Narrow heads (D <= 16), backward: one pass over the scores gives dk, dv, dq and the gradient of the learned part.

The equations are those of ``backward``. A program owns the keys of a tile and several heads, which share index,
channels and masks, and meets all queries. Its scores stand keys by queries, so that p and ds are operands of the
products for dv and dk as they come out, and only ds is turned, for dq. What it adds to dq is a part of its own;
``sum_parts`` adds them up, in one order. The gradient of a table is a product on the tensor cores, one-hot indices [R,
pairs] times ds [pairs, heads]; atomics would need none of this, and their order would change the sums from run to run.

Tensor cores contract 16 numbers at a time, so a product of narrow heads has free places. PACKED operands, copied once
a call, use them: rows of q end in -lse / scale, rows of d_out in -delta, rows of k and v in ones; s - lse and dp -
delta come out of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.halves import equal, multiply_add
from megagraph.kernels.heads import HeadRows, heads_ptrs, planes_ptrs, write_heads
from megagraph.kernels.tile import (
    INTERPRET,
    LOG2E,
    REST,
    Keys,
    Queries,
    Strided,
    _load_plane,
    add_dot,
    bucket_tile,
    delta_of,
    dot,
    find_keys,
    load_lse,
    loop,
    masked_pairs,
    padding_of,
    plane_offsets,
    row_products,
)


class Narrow(NamedTuple):
    """What the pass reads and writes beside its operands."""

    q: Strided  # [B, H, M, D]; PACKED [B, query_rows, HEADS, WIDTH], seen as [B, HEADS, query_rows, WIDTH]
    k: Strided
    v: Strided
    d_out: Strided
    dq: Strided | None  # [B, H, M, D], of the only key tile
    parts: Tensor | None  # else [tiles of a launch, B, query_rows, HEADS, D]
    dk: Strided
    dv: Strided
    # dense [B, H, M, N]; bucket [B, key_tiles, groups, GROUP, R]; projected [B, key_tiles, groups, GROUP, C]
    d_learned: Strided | None
    query_rows: int  # M and Nk padded to whole tiles
    key_rows: int
    part: int  # numbers in one of the parts
    key_tiles: int
    first_tile: int  # of this launch
    tiles: int  # in this launch
    # compile-time constants, as tl.constexpr
    HEADS: int  # H padded to whole groups
    PACKED: bool
    WIDTH: int  # of a row that is contracted
    LOW_D: int  # D padded to 8 or 16: columns of dq, dk and dv
    ACCUMULATE: bool


class Sums(NamedTuple):
    """What a program adds up."""

    dk: tl.tensor  # [GROUP, BLOCK_N, LOW_D]
    dv: tl.tensor  # the same
    learned: tl.tensor  # [WARPS, R, GROUP] of a table, [WARPS, GROUP, C] of a projection


# ---- packed operands


@triton.jit
def _copy_rows(x, n, source, target, place, exists, ends):
    """Rows (b, h, row) [BLOCK] of ``source`` to ``target``, each with three numbers after its own."""
    b, h, row = place
    first, second, third = ends
    offs_d = tl.arange(0, n.WIDTH)[None, :]
    ptrs = source.ptr + (b * source.strides[0] + h * source.strides[1] + row * source.strides[2])[:, None]
    values = tl.load(ptrs + offs_d * source.strides[3], mask=exists[:, None] & (offs_d < x.D), other=0.0)
    values = values.to(x.ACC_DTYPE)
    values = tl.where(offs_d == x.D, first[:, None], values)
    values = tl.where(offs_d == x.D + 1, second[:, None], values)
    values = tl.where(offs_d == x.D + 2, third[:, None], values)
    ptrs = target.ptr + (b * target.strides[0] + h * target.strides[1] + row * target.strides[2])[:, None]
    tl.store(ptrs + offs_d, values)


@triton.jit
def _copy_split(x, n, source, target, place, exists, value):
    """:func:`_copy_rows`, ending in ``value`` as a sum of three numbers of q's dtype."""
    dtype: tl.constexpr = source.ptr.dtype.element_ty
    first = value.to(dtype).to(x.ACC_DTYPE)
    second = (value - first).to(dtype).to(x.ACC_DTYPE)
    third = value - first - second
    _copy_rows(x, n, source, target, place, exists, (first, second, third))


@triton.jit
def pack_rows(x, n, saved, query_programs, BLOCK: tl.constexpr):
    """Grid (query_programs + those of keys); a program packs BLOCK rows, the heads of a row one after another."""
    pid = tl.program_id(0).to(tl.int64)
    if pid < query_programs:
        flat = pid * BLOCK + tl.arange(0, BLOCK)
        h, row, b = flat % n.HEADS, flat // n.HEADS % n.query_rows, flat // n.HEADS // n.query_rows
        exists = (h < x.H) & (row < x.M)
        stat = (b * x.H + h) * x.M + row
        lse = tl.load(saved.lse + stat, mask=exists, other=1e8)  # of a row that does not exist: p = 0
        lse = tl.where(lse == -float("inf"), 0.0, lse)  # no key is valid: s = -inf, whatever stands here
        if saved.out is None:
            delta = tl.load(saved.delta + stat, mask=exists, other=0.0)
        else:
            products = row_products(saved.d_out, saved.out, (b, h, row), exists, x.D, n.LOW_D, x.ACC_DTYPE)
            delta = delta_of(products, saved.d_lse, stat, exists)
        if x.THRESHOLD > 0:  # dp is scaled and dropped before delta is subtracted
            if saved.out is not None:
                tl.store(saved.delta + stat, delta, mask=exists)
            delta = delta * 0
        _copy_split(x, n, x.q, n.q, (b, h, row), exists, lse * (-1.0 / x.scale))
        _copy_split(x, n, saved.d_out, n.d_out, (b, h, row), exists, -delta)
    else:
        flat = (pid - query_programs) * BLOCK + tl.arange(0, BLOCK)
        h, row, b = flat % n.HEADS, flat // n.HEADS % n.key_rows, flat // n.HEADS // n.key_rows
        exists = (h < x.H) & (row < x.Nk)
        ones = tl.full([BLOCK], 1.0, x.ACC_DTYPE)
        _copy_rows(x, n, x.k, n.k, (b, h, row), exists, (ones, ones, ones))
        _copy_rows(x, n, x.v, n.v, (b, h, row), exists, (ones, ones, ones))


# ---- the pass


@triton.jit
def _offsets(n, heads, offs, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets [GROUP, BLOCK, COLUMNS] within [rows, HEADS, WIDTH]; all but the heads are known when compiled."""
    offs_d = tl.arange(0, COLUMNS)[None, None, :]
    return (heads * WIDTH)[:, None, None] + (offs * (n.HEADS * WIDTH))[None, :, None] + offs_d


@triton.jit
def _load_rows(x, n, t, num_rows, of, COLUMNS: tl.constexpr):
    """Rows of several heads of t, [GROUP, BLOCK, COLUMNS]; zero beyond D, where packed ones go on."""
    if n.PACKED:
        rows = tl.load(
            t.ptr
            + (of.b * num_rows + of.start) * (n.HEADS * n.WIDTH)
            + _offsets(n, of.heads, of.offs, n.WIDTH, COLUMNS)
        )
    else:
        ptrs = heads_ptrs(x, t, of, COLUMNS)
        rows = tl.load(ptrs, mask=(tl.arange(0, COLUMNS) < x.D)[None, None, :], other=0.0)
    if INTERPRET and rows.dtype == tl.bfloat16:  # the interpreter multiplies bf16 bit patterns
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _turned_scores(x, n, qk, queries, keys, offs_n, bucket, MASKED: tl.constexpr):
    """Scores [GROUP, BLOCK_N, BLOCK_M] of a group, in base 2 if FOLD; those of a query that does not exist are some
    number."""
    heads = tl.minimum(queries.h, x.H - 1)
    s = qk * (x.scale * LOG2E if x.FOLD else x.scale)
    if x.FORM == "dense":
        ptrs = planes_ptrs(x, x.learned, Queries(queries.b, heads, queries.row, queries.offs, None, None), keys, offs_n)
        values = tl.permute(tl.load(ptrs), (0, 2, 1)).to(x.ACC_DTYPE)
        s += values * LOG2E if x.FOLD else values
    elif x.FORM == "bucket":
        index = tl.trans(bucket).to(tl.int32)
        # [TABLE_SIZE, HEADS], in base 2 if FOLD
        s += tl.load(x.learned.ptr + index[None, :, :] * n.HEADS + queries.h[:, None, None])
    elif x.FORM == "projected":
        stride_h, stride_c = x.learned.strides
        WIDE: tl.constexpr = x.BIAS_DTYPE == x.ACC_DTYPE
        bias = tl.zeros(s.shape, x.BIAS_DTYPE)
        for c in tl.static_range(x.NUM_CHANNELS):
            weight = tl.load(x.learned.ptr + heads * stride_h + c * stride_c).to(x.ACC_DTYPE)
            if WIDE and x.FOLD:
                weight *= LOG2E
            channel = tl.trans(_channel(x, c, queries, keys, offs_n)).to(x.BIAS_DTYPE)
            weight = tl.broadcast_to(weight.to(x.BIAS_DTYPE)[:, None, None], s.shape)
            bias = multiply_add(x, weight, tl.broadcast_to(channel[None, :, :], s.shape), bias)
        if WIDE:
            s += bias
        else:  # rounded as forward does it, to which lse belongs
            s += bias.to(x.ACC_DTYPE) * LOG2E
        if x.bias_mask is not None:
            masked = tl.trans(masked_pairs(x, queries, keys, offs_n, None, False))
            s = tl.where((masked == 0)[None, :, :], s, -float("inf"))
    if x.padding is not None:
        s += padding_of(x, queries.b, keys.col, offs_n, None, False)[None, :, None]
    if MASKED:
        s = tl.where((tl.arange(0, offs_n.shape[0]) < keys.left)[None, :, None], s, -float("inf"))
    return s


@triton.jit
def _channel(x, c, queries, keys, offs_n):
    """Channel c of each pair of nodes, as it is stored."""
    stride_b, stride_c, stride_m, stride_n = x.data.strides
    plane = Strided(x.data.ptr + queries.b * stride_b + c * stride_c, (stride_m, stride_n))
    return _load_plane(x, plane, queries, keys, offs_n, None, False)


@triton.jit
def _channels(x, queries, keys, offs_n, BLOCK_C: tl.constexpr):
    """All channels of each pair, [BLOCK_M, BLOCK_N, BLOCK_C]; columns beyond C repeat them and are not read."""
    stride_b, stride_c, stride_m, stride_n = x.data.strides
    offs_c = (tl.arange(0, BLOCK_C) % x.NUM_CHANNELS).to(tl.int64)[None, None, :]
    start = x.data.ptr + queries.b * stride_b + queries.row * stride_m + keys.col * stride_n
    return tl.load(start + (offs_c * stride_c + plane_offsets(x, stride_m, stride_n, queries.offs, offs_n)[:, :, None]))


@triton.jit
def _add_learned(x, n, sums, ds, queries, keys, offs_n, MASKED: tl.constexpr):
    """The share of ds [GROUP, BLOCK_M, BLOCK_N] of the gradient: a plane is written, a table's or projection's added.

    Every warp sums pairs of its own, so that none does the work of another.
    """
    GROUP: tl.constexpr = ds.shape[0]
    WARPS: tl.constexpr = sums.shape[0]
    PAIRS: tl.constexpr = ds.shape[1] * ds.shape[2] // WARPS
    if x.FORM == "dense":
        heads = Queries(queries.b, tl.minimum(queries.h, x.H - 1), queries.row, queries.offs, None, None)
        keep = (queries.h < x.H)[:, None, None]
        if MASKED:
            in_cols = tl.arange(0, offs_n.shape[0]) < keys.left
            keep = keep & queries.inside[None, :, None] & in_cols[None, None, :]
        tl.store(planes_ptrs(x, n.d_learned, heads, keys, offs_n), ds, mask=keep)
    elif x.FORM == "bucket":
        codes = bucket_tile(x, queries, keys, offs_n, None, False).to(tl.int16) | x.CODE
        # codes of rows are loaded: only then is the one-hot matrix built where the product wants it
        of_rows = tl.load(x.codes + tl.arange(0, sums.shape[1]))[None, :, None]
        codes, of_rows = tl.broadcast(tl.reshape(codes, [WARPS, 1, PAIRS]), of_rows)
        ds = tl.permute(tl.reshape(ds, [GROUP, WARPS, PAIRS]), (1, 2, 0))
        sums = add_dot(sums, equal(x, codes, of_rows, ds.dtype), ds)
    elif x.FORM == "projected":
        channels = _channels(x, queries, keys, offs_n, sums.shape[2]).to(ds.dtype)
        ds = tl.permute(tl.reshape(ds, [GROUP, WARPS, PAIRS]), (1, 0, 2))
        sums = add_dot(sums, ds, tl.reshape(channels, [WARPS, PAIRS, sums.shape[2]]))
    return sums


@triton.jit
def _pass_tile(
    x, n, saved, sums, k, v, k_low, queries, keys, bucket, place, MASKED: tl.constexpr
):  # fmt: skip
    """Add the share of some queries to the sums, and write what these keys add to their dq."""
    b, heads, row = queries.b, queries.h, queries.row
    offs_m = tl.arange(0, queries.offs.shape[0])
    own_m = offs_m if n.PACKED else queries.offs  # rows beyond M are packed, too
    offs_n = tl.arange(0, k.shape[1])
    if MASKED:
        offs_n = tl.minimum(offs_n, keys.left - 1)
    of_rows = HeadRows(b, heads if n.PACKED else tl.minimum(heads, x.H - 1), row, own_m)
    q = _load_rows(x, n, n.q, n.query_rows, of_rows, n.WIDTH)
    do = _load_rows(x, n, n.d_out, n.query_rows, of_rows, n.WIDTH)
    q_low = _load_rows(x, n, n.q, n.query_rows, of_rows, n.LOW_D)
    do_low = _load_rows(x, n, n.d_out, n.query_rows, of_rows, n.LOW_D)
    exists = (heads < x.H)[:, None] & queries.inside[None, :]
    stat = (b * x.H + tl.minimum(heads, x.H - 1))[:, None] * x.M + (row + queries.offs)[None, :]

    s = _turned_scores(x, n, dot(x, k, tl.permute(q, (0, 2, 1))), queries, keys, offs_n, bucket, MASKED)
    if not n.PACKED:
        s -= tl.permute(load_lse(x, saved.lse, stat, exists), (0, 2, 1))
    p = tl.exp2(s if x.FOLD else s * LOG2E)
    dp = dot(x, v, tl.permute(do, (0, 2, 1)))
    p_kept = p
    if x.THRESHOLD > 0:  # kept p is scaled once, in dv
        row_key = row_keys(x, b, heads[:, None], (row + queries.offs)[None, :])
        drop = dropped(x, row_key[:, None, :], (keys.col + offs_n)[None, :, None])
        p_kept = tl.where(drop, 0.0, p)
        dp = tl.where(drop, 0.0, dp * x.KEEP_SCALE)
    if x.THRESHOLD > 0 or not n.PACKED:
        if n.PACKED or saved.out is None:
            delta = tl.load(saved.delta + stat, mask=exists, other=0.0)
        else:
            out = _load_rows(x, n, saved.out, n.query_rows, of_rows, n.LOW_D)
            delta = delta_of(out.to(x.ACC_DTYPE) * do_low.to(x.ACC_DTYPE), saved.d_lse, stat, exists)
        dp -= delta[:, None, :]
    ds = p * dp
    dv = add_dot(sums.dv, p_kept, do_low)
    dk = add_dot(sums.dk, ds, q_low)
    turned = tl.permute(ds.to(k.dtype), (0, 2, 1))
    dq = dot(x, turned, k_low)
    offs_d = tl.arange(0, n.LOW_D)[None, None, :]
    if n.parts is not None:
        start = n.parts + (place * n.part + (b * n.query_rows + row) * (n.HEADS * x.D))
        tl.store(start + _offsets(n, heads, offs_m, x.D, n.LOW_D), dq, mask=offs_d < x.D)
    else:
        write_heads(x, n.dq, of_rows, exists, dq * x.scale, n.ACCUMULATE)
    learned = sums.learned
    if n.d_learned is not None:
        if x.FORM == "dense":
            turned = tl.permute(ds.to(n.d_learned.ptr.dtype.element_ty), (0, 2, 1))
        learned = _add_learned(x, n, learned, turned, queries, keys, offs_n, MASKED)
    return Sums(dk, dv, learned)


@triton.jit
def one_pass(
    x, n, saved,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Grid (B * tiles of this launch * groups); heads vary fastest, as they share an index, which then comes from L2.

    BLOCK_R: rows of a table, or channels, padded to a power of two.
    """
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    groups = n.HEADS // GROUP
    group = pid % groups
    place = pid // groups % n.tiles
    b = pid // groups // n.tiles
    tile = n.first_tile + place
    start, col, left = find_keys(x, tile, BLOCK_N)
    keys = Keys(None, None, start, col, left)
    heads = group * GROUP + tl.arange(0, GROUP)
    own = heads if n.PACKED else tl.minimum(heads, x.H - 1)
    offs_n = tl.arange(0, BLOCK_N)
    near_n = tl.minimum(offs_n, tl.maximum(left - 1, 0))  # what does not exist repeats the last that does
    of_keys = HeadRows(b, own, keys.start, near_n)
    k = _load_rows(x, n, n.k, n.key_rows, of_keys, n.WIDTH)
    v = _load_rows(x, n, n.v, n.key_rows, of_keys, n.WIDTH)
    k_low = _load_rows(x, n, n.k, n.key_rows, of_keys, n.LOW_D)
    dk = tl.zeros([GROUP, BLOCK_N, n.LOW_D], x.ACC_DTYPE)
    if x.FORM == "projected":
        learned = tl.zeros([WARPS, GROUP, BLOCK_R], x.ACC_DTYPE)
    else:
        learned = tl.zeros([WARPS, BLOCK_R, GROUP], x.ACC_DTYPE)
    sums = Sums(dk, tl.zeros_like(dk), learned)

    whole = tl.where(keys.left < BLOCK_N, 0, x.M // BLOCK_M * BLOCK_M).to(tl.int64)
    for MASKED in tl.static_range(2):
        offs_m = tl.arange(0, REST if MASKED else BLOCK_M)
        bucket = _buckets(x, b, whole * 0, tl.minimum(offs_m, x.M - 1), keys, near_n)
        for row in loop(whole if MASKED else 0, x.M if MASKED else whole, REST if MASKED else BLOCK_M):
            near_m = tl.minimum(offs_m, x.M - 1 - row).to(tl.int32) if MASKED else offs_m
            if MASKED:
                bucket = _buckets(x, b, row, near_m, keys, near_n)
                ahead = bucket
            else:
                # compared in 32 bits: half of the instructions
                following = tl.minimum(tl.cast(row + BLOCK_M, tl.int32), tl.cast(whole - BLOCK_M, tl.int32))
                ahead = _buckets(x, b, tl.cast(following, tl.int64), offs_m, keys, offs_n)
            queries = Queries(b, heads, row, near_m, offs_m < x.M - row, None)
            sums = _pass_tile(x, n, saved, sums, k, v, k_low, queries, keys, bucket, place, MASKED)
            bucket = ahead

    exists = (heads < x.H)[:, None] & (offs_n < keys.left)[None, :]
    of_keys = HeadRows(b, tl.minimum(heads, x.H - 1), keys.start, offs_n)
    write_heads(x, n.dk, of_keys, exists, sums.dk * x.scale, n.ACCUMULATE)
    write_heads(x, n.dv, of_keys, exists, sums.dv * x.KEEP_SCALE, n.ACCUMULATE)
    if n.d_learned is not None and x.FORM != "dense":
        ROWS: tl.constexpr = learned.shape[1]
        COLUMNS: tl.constexpr = learned.shape[2]
        ptrs = n.d_learned.ptr + ((b * n.key_tiles + tile) * groups + group) * (ROWS * COLUMNS)
        if x.FORM == "bucket":
            ptrs += tl.arange(0, ROWS)[:, None] + tl.arange(0, COLUMNS)[None, :] * ROWS
        else:
            ptrs += tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(ptrs, tl.sum(sums.learned, axis=0))


@triton.jit
def _buckets(x, b, row, offs_m, keys, offs_n):
    """The buckets of a tile. Loaded a tile ahead, as a load of bytes just before a product makes the compiler arrange
    its operands for bytes."""
    if x.FORM == "bucket":
        bucket = bucket_tile(x, Queries(b, None, row, offs_m, None, None), keys, offs_n, None, False)
    else:
        bucket = row  # never read
    return bucket


@triton.jit
def sum_parts(x, n, dq, total, num_parts, ADD: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of parts [num_parts, B, query_rows, HEADS, D]: times the scale to dq [B, H, M, D] if LAST, else to ``total``,
    one more such plane, which ADD includes. Grid (cdiv(part, BLOCK))."""
    flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < n.part
    result = tl.zeros([BLOCK], x.ACC_DTYPE)
    if ADD:
        result += tl.load(total + flat, mask=inside, other=0.0)
    for part in loop(0, num_parts, 1):
        result += tl.load(n.parts + part * n.part + flat, mask=inside, other=0.0)
    if LAST:
        d, h, row = flat % x.D, flat // x.D % n.HEADS, flat // x.D // n.HEADS % n.query_rows
        b = flat // x.D // n.HEADS // n.query_rows
        ptrs = dq.ptr + b * dq.strides[0] + h * dq.strides[1] + row * dq.strides[2] + d * dq.strides[3]
        keep = inside & (h < x.H) & (row < x.M)
        result *= x.scale
        if n.ACCUMULATE:
            result += tl.load(ptrs, mask=keep, other=0.0)
        tl.store(ptrs, result, mask=keep)
    else:
        tl.store(total + flat, result, mask=inside)
