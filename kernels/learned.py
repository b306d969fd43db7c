"""The gradient of a bucket table or of a projection, from ds.

    dT[h, r] = sum of ds[b, h, i, j] over the pairs whose index is r
    dW[h, c] = sum of ds[b, h, i, j] * channels[b, c, i, j]

Both sums are products on the tensor cores: one-hot indices [R, pairs], or channels [C, pairs], times ds [pairs, heads].
A program owns some queries of several heads, which share index, one-hot matrix and channels. Partial sums of the
programs are added up by the caller, in one order. Atomics would need none of this, and their order would change the
sums from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megagraph.kernels.halves import equal
from megagraph.kernels.tile import add_dot, loop, readable, segment


@triton.jit
def one_hot(x, bucket, codes, WARPS: tl.constexpr, dtype: tl.constexpr):
    """[WARPS, ROWS, pairs of a warp]: 1 where the bucket of a pair of a tile is that of codes [1, ROWS, 1]."""
    PAIRS: tl.constexpr = bucket.shape[0] * bucket.shape[1] // WARPS
    return equal(x, tl.reshape(bucket.to(tl.int16) | x.CODE, [WARPS, 1, PAIRS]), codes, dtype)


@triton.jit
def add_learned(x, sums, factor, ds):
    """Add ds [GROUP, BLOCK_M, BLOCK_N] times factor [WARPS, ROWS, pairs of a warp] to sums [WARPS, ROWS, GROUP]."""
    turned = tl.permute(tl.reshape(ds, [ds.shape[0], sums.shape[0], factor.shape[2]]), (1, 2, 0))
    return add_dot(x, sums, factor, turned)


@triton.jit
def _factor(
    x, b, row, col, offs_m, offs_n, inside, codes, ROWS: tl.constexpr, dtype: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One-hot indices, or channels over and over, of pairs [WARPS, PAIRS]: [WARPS, ROWS, PAIRS]."""
    if x.FORM == "bucket":
        stride_b, stride_m, stride_n = x.data.strides
        ptrs = (x.data.ptr + b * stride_b + row * stride_m + col * stride_n) + (offs_m * stride_m + offs_n * stride_n)
        bucket = tl.load(ptrs, mask=inside, other=0) if MASKED else tl.load(ptrs)
        return equal(x, (bucket.to(tl.int16) | x.CODE)[:, None, :], codes, dtype)
    else:
        stride_b, stride_c, stride_m, stride_n = x.data.strides
        offs_c = (tl.arange(0, ROWS) % x.NUM_CHANNELS).to(tl.int64)[None, :, None] * stride_c
        start = x.data.ptr + b * stride_b + row * stride_m + col * stride_n
        ptrs = start + (offs_c + (offs_m * stride_m + offs_n * stride_n)[:, None, :])
        return (tl.load(ptrs, mask=inside[:, None, :], other=0.0) if MASKED else tl.load(ptrs)).to(dtype)


@triton.jit
def learned_pass(
    x, ds, partials, first_program, num_tiles,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """The share of BLOCK_M queries of GROUP heads, partials [first_program + (B * num_tiles * groups), GROUP, ROWS].
    Grid (B * num_tiles * groups); heads vary fastest, as they share an index.

    Every warp sums pairs of its own, so that none does the work of another.
    """
    pid = tl.program_id(0).to(tl.int64)
    groups = tl.cdiv(x.H, GROUP)
    group = pid % groups
    b = pid // groups // num_tiles
    row = pid // groups % num_tiles * BLOCK_M
    heads = tl.minimum(group * GROUP + tl.arange(0, GROUP), x.H - 1)  # those beyond H repeat the last one
    PAIRS: tl.constexpr = BLOCK_M * BLOCK_N // WARPS
    flat = tl.arange(0, PAIRS)
    offs_m = tl.arange(0, WARPS)[:, None] * (BLOCK_M // WARPS) + (flat // BLOCK_N)[None, :]
    offs_n = ((flat % BLOCK_N)[None, :] + tl.zeros([WARPS, 1], tl.int32)).to(x.OFFSETS)
    exist = offs_m < x.M - row
    near_m = tl.minimum(offs_m, x.M - 1 - row).to(x.OFFSETS)
    stride_b, stride_h, stride_m, stride_n = ds.strides
    of_heads = heads[None, None, :] * stride_h
    of_pairs = (near_m * stride_m + offs_n * stride_n)[:, :, None]
    codes = None
    if x.FORM == "bucket":
        # loaded, not computed: only of a load does the compiler move the change of layout out of the loop
        codes = tl.load(x.codes + tl.arange(0, ROWS))[None, :, None]
    sums = tl.zeros([WARPS, ROWS, GROUP], x.ACC_DTYPE)
    for i in loop(0, x.num_segments, 1):
        _, column_start, length, place = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            for start in loop(whole if MASKED else 0, length if MASKED else whole, BLOCK_N):
                inside = exist & (offs_n < length - start) if MASKED else exist
                here = ds.ptr + b * stride_b + row * stride_m + (place + start) * stride_n
                values = readable(tl.load(here + (of_heads + of_pairs), mask=exist[:, :, None], other=0.0))
                col = column_start + start
                factor = _factor(x, b, row, col, near_m, offs_n, inside, codes, ROWS, values.dtype, MASKED)
                sums = add_dot(x, sums, factor, values)
    offs_sums = tl.arange(0, ROWS)[:, None] + tl.arange(0, GROUP)[None, :] * ROWS
    tl.store(partials + (first_program + pid) * (ROWS * GROUP) + offs_sums, tl.sum(sums, axis=0))
