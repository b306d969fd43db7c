"""One ring step of exact attention with an additive graph bias, forward.

    s = scale * q k^T + b                          b = values | table[index]; of a projection, see ``projection``
    m, l, acc <- online softmax of s against v     FlashAttention, arXiv:2205.14135, Alg. 1
    out = acc / l,  lse = log(sum_j exp(s_j))      written by the last step

With dropout, kept p are scaled by 1 / (1 - dropout_p) and dropped ones are zero; l sums all of them. State and sums
are fp32, or fp64 for fp64 inputs, which run in the interpreter only.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.tile import (
    LN2,
    LOG2E,
    MASKED_BUCKET,
    REST,
    TABLE_SIZE,
    Keys,
    Queries,
    Strided,
    add_dot,
    dot,
    head_ptr,
    load_rows,
    log_sum_exp,
    loop,
    online_softmax,
    scores,
    segment,
    write_rows,
)


class Softmax(NamedTuple):
    """What a step of forward reads and writes beside its operands; ``None`` is what it does not."""

    m: Tensor | None  # [B, H, M], running max, natural; contiguous, as the following
    l: Tensor | None  # [B, H, M], running sum
    acc: Tensor | None  # [B, H, M, D]
    out: Strided | None  # [B, H, M, D]
    lse: Tensor | None  # [B, H, M]


class Running(NamedTuple):
    """The softmax of a program's queries so far."""

    m: tl.tensor  # [BLOCK_M, 1], in base 2 if FOLD
    l: tl.tensor  # [BLOCK_M, 1]
    acc: tl.tensor  # [BLOCK_M, BLOCK_D]


@triton.jit
def _fwd_tile(x, running, q, queries, keys, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    """Fold keys into the running softmax."""
    offs_n = tl.arange(0, BLOCK_N)
    in_cols = offs_n < keys.left
    k = load_rows(x, x.k, keys.k, keys.start, offs_n, keys.left, MASKED)
    v = load_rows(x, x.v, keys.v, keys.start, offs_n, keys.left, MASKED)
    s = scores(x, dot(x, q, tl.trans(k)), queries, keys, offs_n, in_cols, MASKED)
    m, p, rescale = online_softmax(x, running.m, s)
    l = running.l * rescale + tl.sum(p, axis=1, keep_dims=True)
    if x.THRESHOLD > 0:  # kept p is scaled once, in out
        p = tl.where(dropped(x, queries.keys[:, None], (keys.col + offs_n)[None, :]), 0.0, p)
    return Running(m, l, add_dot(x, running.acc * rescale, p, v))


@triton.jit
def read_softmax(x, softmax, state, offs_d, in_state, in_acc, FIRST: tl.constexpr):
    """The softmax so far of rows whose numbers stand at ``state``; in_state [..., rows, 1], in_acc [..., rows, D]."""
    if FIRST:
        m = tl.full(in_state.shape, -float("inf"), x.ACC_DTYPE)
        l = tl.zeros(in_state.shape, x.ACC_DTYPE)
        acc = tl.zeros(in_acc.shape, x.ACC_DTYPE)
    else:
        m = tl.load(softmax.m + state, mask=in_state, other=-float("inf"))
        l = tl.load(softmax.l + state, mask=in_state, other=0.0)
        acc = tl.load(softmax.acc + state * x.D + offs_d, mask=in_acc, other=0.0)
        if x.FOLD:
            m *= LOG2E
    return Running(m, l, acc)


@triton.jit
def write_softmax(x, softmax, state, offs_d, in_state, in_acc, running):
    """What :func:`read_softmax` reads at the next step."""
    m = running.m * LN2 if x.FOLD else running.m
    tl.store(softmax.m + state, m, mask=in_state)
    tl.store(softmax.l + state, running.l, mask=in_state)
    tl.store(softmax.acc + state * x.D + offs_d, running.acc, mask=in_acc)


@triton.jit
def step_fwd(
    x, softmax, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_tiles * H); one program owns BLOCK_M query rows of one head.

    Heads vary fastest: they share index, channels and masks, which then come from L2. Here m is in base 2 if FOLD;
    in memory it is natural.
    """
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    h = pid % x.H
    tile = pid // x.H
    b = tile // num_tiles
    row = tile % num_tiles * BLOCK_M
    offs = tl.arange(0, BLOCK_M)
    in_rows = offs < x.M - row
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)  # rows beyond M repeat the last one, and are not stored
    state = (b * x.H + h) * x.M + row + offs[:, None]
    in_state = in_rows[:, None]
    offs_d = tl.arange(0, x.BLOCK_D)[None, :]
    in_acc = in_state & (offs_d < x.D)

    q = load_rows(x, x.q, head_ptr(x, x.q, b, h), row, offs_m, x.M, False)
    running = read_softmax(x, softmax, state, offs_d, in_state, in_acc, FIRST)

    k_ptr = head_ptr(x, x.k, b, h)
    v_ptr = head_ptr(x, x.v, b, h)
    queries = Queries(b, h, row, offs_m, in_rows, row_keys(x, b, h, row + offs_m))
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length, place = segment(x, i)
        whole = length // BLOCK_N * BLOCK_N
        for MASKED in tl.static_range(2):
            for start in loop(whole if MASKED else 0, length if MASKED else whole, REST if MASKED else BLOCK_N):
                keys = Keys(k_ptr, v_ptr, key_start + start, column_start + start, place + start, length - start)
                running = _fwd_tile(x, running, q, queries, keys, REST if MASKED else BLOCK_N, MASKED)

    m, l, acc = running
    if LAST:
        lse, l_safe = log_sum_exp(x, m, l)
        tl.store(softmax.lse + state, lse, mask=in_state)
        write_rows(x, softmax.out, (b, h, row), offs, x.M - row, acc * (x.KEEP_SCALE / l_safe), False)
    else:
        write_softmax(x, softmax, state, offs_d, in_state, in_acc, running)


@triton.jit
def pad_table(table, padded, H, R, GROUP, BLOCK: tl.constexpr):
    """A table [H, R] as padded [groups, TABLE_SIZE, GROUP]: NaN beyond R, -inf for the masked bucket, 0 beyond H. Grid
    (cdiv(numbers of padded, BLOCK))."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    entry, h = flat // GROUP % TABLE_SIZE, flat // (GROUP * TABLE_SIZE) * GROUP + flat % GROUP
    ptrs = table.ptr + h * table.strides[0] + entry * table.strides[1]
    values = tl.load(ptrs, mask=(h < H) & (entry < R), other=float("nan")).to(padded.dtype.element_ty)
    values = tl.where(entry == MASKED_BUCKET, -float("inf"), values)
    values = tl.where(h < H, values, 0.0)
    tl.store(padded + flat, values, mask=flat < tl.cdiv(H, GROUP) * GROUP * TABLE_SIZE)
