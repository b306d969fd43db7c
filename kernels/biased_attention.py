"""One ring step of exact attention with an additive graph bias, forward and backward.

    s = scale * q k^T + b                          b = values | table[index] | sum_c weight[c] * channels[c]
    m, l, acc <- online softmax of s against v     FlashAttention, arXiv:2205.14135, Alg. 1
    out = acc / l,  lse = log(sum_j exp(s_j))      written by the last step

    p = exp(s - lse),  dp = d_out v^T              Alg. 4; the caller gives delta = sum(d_out * out) - d_lse
    ds = p * (dp - delta)
    dq += scale * ds k,  dk += scale * ds^T q,  dv += p^T d_out,  db += ds

With dropout, kept p and dp are scaled by 1 / (1 - dropout_p) and dropped ones are zero; l sums all of them.

B batch, H heads, M queries on this rank, Nk keys in the visiting block, N bias columns, D head dim.
Scores, m and lse are in natural log. exp(x) is exp2(x * log2 e) of a difference x of two scores, which is
rounded where it is small: scores in base 2 would round lse and every bias once more, up to twice the error of
fp32 gradients. State and sums are fp32, or fp64 for fp64 inputs, which run in the interpreter only.

Segments (key_start, column_start, length) say which bias columns the visiting keys own. No tile straddles two
segments, so the columns of a tile are consecutive. No atomics: every sum has one order, and two runs agree.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
MASKED_BUCKET: tl.constexpr = tl.constexpr(255)
INTERPRET: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


def _interpreted_range(start, stop, step):
    """``range`` over the interpreter's one-element tensors, which numpy >= 2.4 does not turn into ints."""
    bounds = (int(x.handle.data.item()) if isinstance(x, tl.tensor) else int(x) for x in (start, stop, step))
    yield from range(*bounds)


_range = _interpreted_range if INTERPRET else tl.range  # compiled, it must be a loop that Triton can pipeline


class Strided(NamedTuple):
    """A tensor as a kernel argument; strides are in elements, 0 along a broadcast axis."""

    ptr: Tensor
    strides: tuple[int, ...]


class Operands(NamedTuple):
    """What forward and backward read. ``None`` is a compile-time constant: what is absent costs nothing."""

    q: Strided  # [B, H, M, D]
    k: Strided  # [B, H, Nk, D]
    v: Strided  # [B, H, Nk, D]
    learned: Strided | None  # dense [B, H, M, N], bucket [H, R], projected [H, C]
    data: Strided | None  # bucket [B, M, N], projected [B, C, M, N]
    bias_mask: Strided | None  # [B, M, N], nonzero = masked
    padding: Strided | None  # [B, N], nonzero = masked
    dropout_key: Tensor | None  # int32 [B]
    row_ids: Tensor | None  # int32 [M]
    segments: Tensor  # int32 [num_segments, 3]
    num_segments: int
    scale: float
    H: int
    M: int
    Nk: int


@triton.jit
def _load_rows(x, b, h, rows, mask, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of x[b, h] as a tile [BLOCK, BLOCK_D], zero where masked and beyond column D."""
    stride_b, stride_h, stride_row, stride_d = x.strides
    offs_d = tl.arange(0, BLOCK_D).to(tl.int64)
    ptrs = x.ptr + b * stride_b + h * stride_h + rows[:, None] * stride_row + offs_d[None, :] * stride_d
    tile = tl.load(ptrs, mask=mask[:, None] & (offs_d < D)[None, :], other=0.0)
    if INTERPRET and tile.dtype == tl.bfloat16:  # the interpreter multiplies bf16 bit patterns
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _dot(a, b, ACC_DTYPE: tl.constexpr):
    """a b; "ieee" keeps fp32 inputs fp32, where the default would round them to tf32."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=ACC_DTYPE)


@triton.jit
def _add_dot(acc, p, x):
    """acc + p x, with the scores-shaped p rounded to x's dtype for the tensor cores."""
    return tl.dot(p.to(x.dtype), x, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def _row_offsets(bh, rows, M, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets and column mask of rows [BLOCK, BLOCK_D] in a contiguous [B * H, M, D] accumulator."""
    offs_d = tl.arange(0, BLOCK_D)
    return (bh * M + rows)[:, None] * D + offs_d[None, :], (offs_d < D)[None, :]


@triton.jit
def _add_rows(ptr, bh, rows, mask, tile, M, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """ptr[bh, rows] += tile, in a contiguous [B * H, M, D] accumulator; the rows are this program's alone."""
    offs, in_d = _row_offsets(bh, rows, M, D, BLOCK_D)
    keep = mask[:, None] & in_d
    tl.store(ptr + offs, tl.load(ptr + offs, mask=keep) + tile, mask=keep)


@triton.jit
def _segment(segments, i, ALIGNMENT: tl.constexpr):
    """(key_start, column_start, length); ALIGNMENT divides the last two, so that bias loads can be wide."""
    key_start = tl.load(segments + 3 * i)
    column_start = tl.multiple_of(tl.load(segments + 3 * i + 1), ALIGNMENT)
    length = tl.multiple_of(tl.load(segments + 3 * i + 2), ALIGNMENT)
    return key_start, column_start, length


@triton.jit
def _mix32(x):
    """MurmurHash3's 32-bit finaliser on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _row_keys(x, b, h, rows, mask, THRESHOLD: tl.constexpr):
    """uint32 dropout key of each query row: mix32(mix32(key[b] ^ h) ^ global row)."""
    global_rows = rows
    if THRESHOLD > 0:
        if x.row_ids is not None:
            global_rows = tl.load(x.row_ids + rows, mask=mask, other=0)
        key = tl.load(x.dropout_key + b).to(tl.uint32, bitcast=True)
        return _mix32(_mix32(key ^ h.to(tl.uint32)) ^ global_rows.to(tl.uint32))
    return global_rows.to(tl.uint32)  # never read


@triton.jit
def _dropped(row_keys, cols, THRESHOLD: tl.constexpr):
    """True = dropped; row_keys and cols broadcast to the tile in either orientation."""
    return _mix32(row_keys ^ (cols.to(tl.uint32) * 0x9E3779B9)) < THRESHOLD


@triton.jit
def _bucket_tile(x, b, rows, cols, inside):
    """Bucket of each pair, int32; MASKED_BUCKET outside."""
    stride_b, stride_m, stride_n = x.data.strides
    ptrs = x.data.ptr + b * stride_b + rows * stride_m + cols * stride_n
    return tl.load(ptrs, mask=inside, other=MASKED_BUCKET).to(tl.int32)


@triton.jit
def _channel_tile(x, c, b, rows, cols, inside):
    """Channel c of each pair; 0 outside."""
    stride_b, stride_c, stride_m, stride_n = x.data.strides
    ptrs = x.data.ptr + b * stride_b + c * stride_c + rows * stride_m + cols * stride_n
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _scores(x, qk, b, h, rows, cols, in_rows, in_cols, FORM: tl.constexpr, NUM_LEARNED: tl.constexpr):
    """Scores scale * qk + b[b, h, rows, cols], -inf where masked or outside.

    rows and cols, int64, broadcast to the tile: [BLOCK_M, 1] and [1, BLOCK_N], or both transposed. Bias loads
    carry the bounds alone, which are equal along runs of columns, so that they stay wide.
    """
    inside = in_rows & in_cols
    s = qk * x.scale
    if FORM == "dense":
        stride_b, stride_h, stride_m, stride_n = x.learned.strides
        ptrs = x.learned.ptr + b * stride_b + h * stride_h + rows * stride_m + cols * stride_n
        s += tl.load(ptrs, mask=inside, other=-float("inf")).to(s.dtype)
    elif FORM == "bucket":
        stride_h, stride_r = x.learned.strides
        bucket = _bucket_tile(x, b, rows, cols, inside)
        # a bucket beyond the table reads NaN, not a stray number
        ptrs = x.learned.ptr + h * stride_h + bucket * stride_r
        value = tl.load(ptrs, mask=bucket < NUM_LEARNED, other=float("nan")).to(s.dtype)
        s = tl.where(bucket == MASKED_BUCKET, -float("inf"), s + value)
    else:
        valid = inside
        if FORM == "projected":
            stride_h, stride_c = x.learned.strides
            for c in tl.static_range(NUM_LEARNED):
                weight = tl.load(x.learned.ptr + h * stride_h + c * stride_c).to(s.dtype)
                s += weight * _channel_tile(x, c, b, rows, cols, inside).to(s.dtype)
            if x.bias_mask is not None:
                stride_b, stride_m, stride_n = x.bias_mask.strides
                ptrs = x.bias_mask.ptr + b * stride_b + rows * stride_m + cols * stride_n
                valid = tl.load(ptrs, mask=inside, other=1) == 0
        s = tl.where(valid, s, -float("inf"))
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        padding = tl.load(x.padding.ptr + b * stride_b + cols * stride_n, mask=in_cols, other=1)
        s = tl.where(padding == 0, s, -float("inf"))
    return s


@triton.jit
def _load_lse(lse_ptr, offs, mask):
    """Log-sum-exp of each row; +inf where there was no key or is no row, so that exp(s - lse) = 0."""
    lse = tl.load(lse_ptr + offs, mask=mask, other=float("inf"))
    return tl.where(lse == -float("inf"), float("inf"), lse)


@triton.jit
def _step_fwd(
    x, m_ptr, l_ptr, acc_ptr, out, lse_ptr, num_tiles,
    FORM: tl.constexpr, NUM_LEARNED: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ALIGNMENT: tl.constexpr, ACC_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_tiles * H); one program owns BLOCK_M query rows of one head.

    Heads vary fastest: they share index, channels and masks, which then come from L2.
    """
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    h = pid % x.H
    tile = pid // x.H
    b = tile // num_tiles
    rows = tile % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < x.M
    bh = b * x.H + h
    state = bh * x.M + rows
    offs_acc, in_d = _row_offsets(bh, rows, x.M, D, BLOCK_D)

    if FIRST:
        m = tl.full([BLOCK_M], -float("inf"), ACC_DTYPE)
        l = tl.zeros([BLOCK_M], ACC_DTYPE)
        acc = tl.zeros([BLOCK_M, BLOCK_D], ACC_DTYPE)
    else:
        m = tl.load(m_ptr + state, mask=in_rows, other=-float("inf"))
        l = tl.load(l_ptr + state, mask=in_rows, other=0.0)
        acc = tl.load(acc_ptr + offs_acc, mask=in_rows[:, None] & in_d, other=0.0)

    q = _load_rows(x.q, b, h, rows, in_rows, D, BLOCK_D)
    row_keys = _row_keys(x, b, h, rows, in_rows, THRESHOLD)
    for i in _range(0, x.num_segments, 1):
        key_start, column_start, length = _segment(x.segments, i, ALIGNMENT)
        for start in _range(0, length, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            in_keys = offs_n < length
            keys = (key_start + offs_n).to(tl.int64)
            cols = (column_start + offs_n).to(tl.int64)[None, :]
            k = _load_rows(x.k, b, h, keys, in_keys, D, BLOCK_D)
            v = _load_rows(x.v, b, h, keys, in_keys, D, BLOCK_D)

            qk = _dot(q, tl.trans(k), ACC_DTYPE)
            s = _scores(
                x, qk, b, h, rows[:, None], cols, in_rows[:, None], in_keys[None, :], FORM, NUM_LEARNED
            )  # [BLOCK_M, BLOCK_N]

            m_new = tl.maximum(m, tl.max(s, axis=1))
            # a row that has met no valid key keeps m == -inf; a finite pivot avoids (-inf) - (-inf)
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
            rescale = _exp(m - pivot)
            p = _exp(s - pivot[:, None])
            l = l * rescale + tl.sum(p, axis=1)
            if THRESHOLD > 0:  # kept p is scaled once, in out
                p = tl.where(_dropped(row_keys[:, None], cols, THRESHOLD), 0.0, p)
            acc = _add_dot(acc * rescale[:, None], p, v)
            m = m_new

    if LAST:
        l_safe = tl.where(l == 0.0, 1.0, l)  # a row that met no valid key: out = 0, lse = m = -inf
        tl.store(lse_ptr + state, m + tl.log2(l_safe) * LN2, mask=in_rows)
        stride_b, stride_h, stride_m, stride_d = out.strides
        offs_d = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
        out_ptrs = out.ptr + b * stride_b + h * stride_h + rows[:, None] * stride_m + offs_d * stride_d
        tl.store(out_ptrs, acc * (KEEP_SCALE / l_safe)[:, None], mask=in_rows[:, None] & in_d)
    else:
        tl.store(m_ptr + state, m, mask=in_rows)
        tl.store(l_ptr + state, l, mask=in_rows)
        tl.store(acc_ptr + offs_acc, acc, mask=in_rows[:, None] & in_d)


@triton.jit
def _bwd_keys(
    x, d_out, lse_ptr, delta_ptr, dk_ptr, dv_ptr, b, h, key_start, column_start, length, start,
    FORM: tl.constexpr, NUM_LEARNED: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ACC_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dk, dv of the BLOCK_N keys at ``start`` of a segment, over all query tiles.

    Tiles are transposed, [BLOCK_N, BLOCK_M]: p^T and ds^T are then left operands straight from registers.
    """
    offs_n = start + tl.arange(0, BLOCK_N)
    in_keys = offs_n < length
    keys = (key_start + offs_n).to(tl.int64)
    cols = (column_start + offs_n).to(tl.int64)[:, None]
    bh = b * x.H + h
    k = _load_rows(x.k, b, h, keys, in_keys, D, BLOCK_D)
    v = _load_rows(x.v, b, h, keys, in_keys, D, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], ACC_DTYPE)
    dv = tl.zeros([BLOCK_N, BLOCK_D], ACC_DTYPE)
    for start_m in _range(0, x.M, BLOCK_M):
        rows = (start_m + tl.arange(0, BLOCK_M)).to(tl.int64)
        in_rows = rows < x.M
        q = _load_rows(x.q, b, h, rows, in_rows, D, BLOCK_D)
        do = _load_rows(d_out, b, h, rows, in_rows, D, BLOCK_D)
        lse = _load_lse(lse_ptr, bh * x.M + rows, in_rows)
        delta = tl.load(delta_ptr + bh * x.M + rows, mask=in_rows, other=0.0)

        qk = _dot(k, tl.trans(q), ACC_DTYPE)
        s = _scores(x, qk, b, h, rows[None, :], cols, in_rows[None, :], in_keys[:, None], FORM, NUM_LEARNED)
        p = _exp(s - lse[None, :])
        dp = _dot(v, tl.trans(do), ACC_DTYPE)
        p_kept = p
        if THRESHOLD > 0:  # kept p is scaled once, in dv
            row_keys = _row_keys(x, b, h, rows, in_rows, THRESHOLD)
            dropped = _dropped(row_keys[None, :], cols, THRESHOLD)
            p_kept = tl.where(dropped, 0.0, p)
            dp = tl.where(dropped, 0.0, dp * KEEP_SCALE)
        dv = _add_dot(dv, p_kept, do)
        ds = p * (dp - delta[None, :])
        dk = _add_dot(dk, ds, q)
    _add_rows(dk_ptr, bh, keys, in_keys, dk * x.scale, x.Nk, D, BLOCK_D)
    _add_rows(dv_ptr, bh, keys, in_keys, dv * KEEP_SCALE, x.Nk, D, BLOCK_D)


@triton.jit
def _learned_sums(
    x, ds, b, rows, cols, inside, FORM: tl.constexpr, NUM_LEARNED: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """This tile's gradient of one head's table or weight, [BLOCK_R]."""
    offs_r = tl.arange(0, BLOCK_R)
    sums = tl.zeros([BLOCK_R], ds.dtype)
    if FORM == "bucket":
        bucket = _bucket_tile(x, b, rows, cols, inside)
        for r in _range(0, NUM_LEARNED, 1):
            sums += tl.where(offs_r == r, tl.sum(tl.where(bucket == r, ds, 0.0)), 0.0)
    else:
        for c in tl.static_range(NUM_LEARNED):
            channel = _channel_tile(x, c, b, rows, cols, inside).to(ds.dtype)
            sums += tl.where(offs_r == c, tl.sum(ds * channel), 0.0)
    return sums


@triton.jit
def _bwd_queries(
    x, d_out, lse_ptr, delta_ptr, dq_ptr, d_learned, b, h, tile, num_tiles,
    FORM: tl.constexpr, NUM_LEARNED: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ALIGNMENT: tl.constexpr, ACC_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """dq and the bias gradient of BLOCK_M query rows of one head, over all keys."""
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < x.M
    bh = b * x.H + h
    q = _load_rows(x.q, b, h, rows, in_rows, D, BLOCK_D)
    do = _load_rows(d_out, b, h, rows, in_rows, D, BLOCK_D)
    lse = _load_lse(lse_ptr, bh * x.M + rows, in_rows)
    delta = tl.load(delta_ptr + bh * x.M + rows, mask=in_rows, other=0.0)
    row_keys = _row_keys(x, b, h, rows, in_rows, THRESHOLD)
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC_DTYPE)
    sums = tl.zeros([BLOCK_R], ACC_DTYPE)
    for i in _range(0, x.num_segments, 1):
        key_start, column_start, length = _segment(x.segments, i, ALIGNMENT)
        for start in _range(0, length, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            in_keys = offs_n < length
            keys = (key_start + offs_n).to(tl.int64)
            cols = (column_start + offs_n).to(tl.int64)[None, :]
            k = _load_rows(x.k, b, h, keys, in_keys, D, BLOCK_D)
            v = _load_rows(x.v, b, h, keys, in_keys, D, BLOCK_D)

            qk = _dot(q, tl.trans(k), ACC_DTYPE)
            s = _scores(x, qk, b, h, rows[:, None], cols, in_rows[:, None], in_keys[None, :], FORM, NUM_LEARNED)
            p = _exp(s - lse[:, None])
            dp = _dot(do, tl.trans(v), ACC_DTYPE)
            if THRESHOLD > 0:
                dp = tl.where(_dropped(row_keys[:, None], cols, THRESHOLD), 0.0, dp * KEEP_SCALE)
            ds = p * (dp - delta[:, None])  # 0 for a masked pair, whose p is 0
            dq = _add_dot(dq, ds, k)

            if d_learned is not None:
                inside = in_rows[:, None] & in_keys[None, :]
                if FORM == "dense":
                    stride_b, stride_h, stride_m, stride_n = d_learned.strides
                    db_ptrs = d_learned.ptr + b * stride_b + h * stride_h
                    db_ptrs += rows[:, None] * stride_m + cols * stride_n
                    tl.store(db_ptrs, tl.load(db_ptrs, mask=inside) + ds, mask=inside)
                else:
                    sums += _learned_sums(x, ds, b, rows[:, None], cols, inside, FORM, NUM_LEARNED, BLOCK_R)
    _add_rows(dq_ptr, bh, rows, in_rows, dq * x.scale, x.M, D, BLOCK_D)
    if d_learned is not None and FORM != "dense":  # partial sums [B * H, num_tiles, NUM_LEARNED]
        offs_r = tl.arange(0, BLOCK_R)
        sums_ptrs = d_learned.ptr + (bh * num_tiles + tile) * NUM_LEARNED + offs_r
        tl.store(sums_ptrs, sums, mask=offs_r < NUM_LEARNED)


@triton.jit
def _step_bwd(
    x, d_out, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, d_learned,
    num_key_programs, num_key_tiles, num_query_tiles, group_b, group_h,
    FORM: tl.constexpr, NUM_LEARNED: tl.constexpr, THRESHOLD: tl.constexpr, KEEP_SCALE: tl.constexpr,
    ALIGNMENT: tl.constexpr, ACC_DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (num_key_programs + num_query_programs); heads vary fastest, as in forward.

    A key program owns one key tile of one head and gives dk, dv. A query program owns one query tile of one
    bias plane, which group_b * group_h heads share, and gives their dq and the plane's gradient. The group is
    one head unless the gradient of a broadcast dense plane is wanted.
    """
    pid = tl.program_id(0).to(tl.int64)
    if pid < num_key_programs:
        h = pid % x.H
        tile = pid // x.H % num_key_tiles
        b = pid // x.H // num_key_tiles
        for i in _range(0, x.num_segments, 1):  # find the segment that holds this tile
            key_start, column_start, length = _segment(x.segments, i, ALIGNMENT)
            segment_tiles = tl.cdiv(length, BLOCK_N)
            if (tile >= 0) & (tile < segment_tiles):
                _bwd_keys(
                    x, d_out, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                    b, h, key_start, column_start, length, tile.to(tl.int32) * BLOCK_N,
                    FORM, NUM_LEARNED, THRESHOLD, KEEP_SCALE, ACC_DTYPE, D, BLOCK_D, BLOCK_M, BLOCK_N,
                )  # fmt: skip
            tile -= segment_tiles
    else:
        planes_h = x.H // group_h
        pid -= num_key_programs
        plane_h = pid % planes_h
        tile = pid // planes_h % num_query_tiles
        plane_b = pid // planes_h // num_query_tiles
        for g in _range(0, group_b * group_h, 1):
            _bwd_queries(
                x, d_out, lse_ptr, delta_ptr, dq_ptr, d_learned,
                plane_b * group_b + g // group_h, plane_h * group_h + g % group_h, tile, num_query_tiles,
                FORM, NUM_LEARNED, THRESHOLD, KEEP_SCALE, ALIGNMENT, ACC_DTYPE,
                D, BLOCK_D, BLOCK_M, BLOCK_N, BLOCK_R,
            )  # fmt: skip
            tl.debug_barrier()  # the next head reads what this one added to the plane's gradient


def _block_sizes(M: int, N: int, D: int, itemsize: int, backward: bool) -> dict[str, int]:
    """Tile sizes for M queries, N keys, head dim D.

    64 rows fill one warpgroup's tensor-core instruction. What bounds a tile is what lives in registers, the
    scores [BLOCK_M, BLOCK_N] and the accumulators [BLOCK, D], one in forward and two in backward, and in
    shared memory the key and value tiles, two in flight. So forward runs 4 warps, and several programs on a
    multiprocessor hide each other's loads and exponentials; backward spreads its tile over 8 warps; wide
    heads take shorter tiles. Exact fp32 products run outside the tensor cores, with operands in registers
    too. Small problems take small tiles, as rows beyond M and N are computed and thrown away; 16 is the least
    that tl.dot takes.
    """
    if itemsize > 2:
        block_m, block_n, num_warps = 32, 32 if D <= 128 else 16, 8
    elif D <= 128:
        block_m, block_n, num_warps = 64, 64, 8 if backward else 4
    else:
        block_m, block_n, num_warps = 32 if backward else 64, 32, 8
    return {
        "BLOCK_M": min(block_m, max(16, triton.next_power_of_2(M))),
        "BLOCK_N": min(block_n, max(16, triton.next_power_of_2(N))),
        "num_warps": num_warps,
        "num_stages": 2 if D * itemsize <= 512 else 1,
    }


@functools.lru_cache(maxsize=256)
def _segment_table(segments: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    return torch.tensor(segments, dtype=torch.int32, device=device).reshape(len(segments), 3)


def _strided(x, *batch):
    """A kernel argument, with the leading axes expanded to ``batch``; bool travels as bytes."""
    if x is None:
        return None
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    x = x.expand(*batch, *x.shape[len(batch) :])
    return Strided(x, x.stride())


def _arguments(
    q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids,
):  # fmt: skip
    """The operands and compile-time constants that forward and backward share."""
    B, H, M, D = q.shape
    segments = tuple((int(key), int(column), int(length)) for key, column, length in segments)
    dropout = dropout_key is not None and dropout_p > 0.0
    operands = Operands(
        q=_strided(q),
        k=_strided(k),
        v=_strided(v),
        learned=_strided(learned, B, H) if form == "dense" else _strided(learned),
        data=_strided(data, B),
        bias_mask=_strided(bias_mask, B),
        padding=_strided(key_padding_mask),
        dropout_key=dropout_key.contiguous() if dropout else None,
        row_ids=row_ids.contiguous() if dropout and row_ids is not None else None,
        segments=_segment_table(segments, q.device),
        num_segments=len(segments),
        scale=float(scale),
        H=H,
        M=M,
        Nk=k.shape[2],
    )
    constants = {
        "FORM": form,
        "NUM_LEARNED": 0 if form in ("none", "dense") else learned.shape[1],
        "THRESHOLD": int(dropout_p * (1 << 32)) if dropout else 0,
        "KEEP_SCALE": 1.0 / (1.0 - dropout_p) if dropout else 1.0,
        "ALIGNMENT": math.gcd(16, *(x for segment in segments for x in segment[1:])),
        "ACC_DTYPE": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "D": D,
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
    }
    return operands, constants, segments


def launch_step_fwd(
    q, k, v, *, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids,
    first, last, m, l, acc, out, lse,
) -> None:  # fmt: skip
    """Fold one visiting block of keys into the softmax state, or into ``out`` and ``lse`` at the last step.

    Args:
        q: [B, H, M, D], any strides, D <= 256.
        k, v: [B, H, Nk, D], any strides, dtype of q.
        form: ``"none"``, ``"dense"``, ``"bucket"`` or ``"projected"``.
        data: bucket: uint8 [B or 1, M, N], 255 = masked; projected: channels [B or 1, C, M, N]; else None.
        learned: dense: values [B or 1, H or 1, M, N], -inf = masked; bucket: table [H, R];
            projected: weight [H, C].
        bias_mask: projected only: bool [B or 1, M, N], True = masked, or None.
        key_padding_mask: bool [B, N], True = ignore, or None.
        segments: (key_start, column_start, length) triples: these keys own these bias columns.
        dropout_p, dropout_key: probability and int32 [B], or None for no dropout.
        row_ids: int32 [M], global row of each query for dropout; None: the local row.
        first: start from the empty state instead of reading m, l, acc.
        last: write out and lse instead of m, l, acc.
        m, l: [B, H, M], running max of the scores and running sum; contiguous, fp32 (fp64 for fp64 q).
        acc: [B, H, M, D], unnormalised output; as m. All three None if first and last.
        out: [B, H, M, D], any strides; 0 for a row that met no valid key. None before the last step.
        lse: contiguous [B, H, M], natural log; -inf for a row that met no valid key. None as out.
    """
    operands, constants, _ = _arguments(
        q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
        scale, dropout_p, dropout_key, row_ids,
    )  # fmt: skip
    B, H, M, D = q.shape
    assert all(x is None or x.is_contiguous() for x in (m, l, acc, lse))
    blocks = _block_sizes(M, k.shape[2], D, q.element_size(), backward=False)
    num_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    with torch.cuda.device_of(q):
        _step_fwd[(B * num_tiles * H,)](
            operands, m, l, acc, _strided(out), lse, num_tiles, FIRST=first, LAST=last, **constants, **blocks
        )


def launch_step_bwd(
    q, k, v, *, form, data, learned, bias_mask, key_padding_mask, segments,
    scale, dropout_p, dropout_key, row_ids,
    d_out, lse, delta, dq, dk, dv, d_learned,
) -> None:  # fmt: skip
    """Add one visiting block's gradients into dq, dk, dv and d_learned; two calls give the same bits.

    Args (else as in :func:`launch_step_fwd`):
        d_out: [B, H, M, D], any strides, dtype of q.
        lse: [B, H, M] of the whole softmax. delta: [B, H, M], sum(d_out * out) - d_lse. Both contiguous.
        dq: [B, H, M, D]. dk, dv: [B, H, Nk, D] of this block. Contiguous, fp32 (fp64 for fp64 q).
        d_learned: shape of ``learned``, dtype of dq, summed over broadcast axes; None = not wanted.
    """
    operands, constants, segments = _arguments(
        q, k, v, form, data, learned, bias_mask, key_padding_mask, segments,
        scale, dropout_p, dropout_key, row_ids,
    )  # fmt: skip
    B, H, M, D = q.shape
    assert all(x.is_contiguous() for x in (lse, delta, dq, dk, dv))
    blocks = _block_sizes(M, k.shape[2], D, q.element_size(), backward=True)
    query_tiles = triton.cdiv(M, blocks["BLOCK_M"])
    key_tiles = sum(triton.cdiv(length, blocks["BLOCK_N"]) for _, _, length in segments)

    planes_b, planes_h, grad, partials = B, H, None, None
    if d_learned is not None and form == "dense":
        planes_b, planes_h = d_learned.shape[:2]
        # expanded: every head of a group addresses the plane it shares
        grad = _strided(d_learned, B, H)
    elif d_learned is not None:
        partials = dq.new_empty(B, H, query_tiles, d_learned.shape[1])
        grad = _strided(partials)
    with torch.cuda.device_of(q):
        _step_bwd[(B * key_tiles * H + planes_b * query_tiles * planes_h,)](
            operands, _strided(d_out), lse, delta, dq, dk, dv, grad,
            B * key_tiles * H, key_tiles, query_tiles, B // planes_b, H // planes_h,
            BLOCK_R=max(2, triton.next_power_of_2(constants["NUM_LEARNED"])), **constants, **blocks,
        )  # fmt: skip
    if partials is not None:
        d_learned += partials.sum(dim=(0, 2))
