"""Attention over listed pairs: a query walks the list of its keys, a key the list of its queries.

The equations, and the softmax so far, are those of ``forward``; ``pairs_backward`` has the gradients.

Nothing is kept of a pair but its data, and nothing is computed that is not listed, but what fills a list up to whole
tiles. No atomics: every sum has one order, and two runs agree.

A list has one row of its own, too little for the tensor cores, but several heads. 16-bit rows of all heads of a program
are multiplied at once, the own one spread out with a column for each head:

    scores   [pairs, heads]  =  visited [pairs, heads * width]  own [heads * width, heads]
    sums     [heads * width, heads]  +=  visited^T  weights [pairs, heads]

where ``own`` is zero but in the column of the head that a number belongs to, and the same numbers of ``sums`` are kept
in the end. Wider numbers, whose products run outside the tensor cores, are multiplied one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.forward import Running
from megagraph.kernels.tile import (
    INTERPRET,
    LN2,
    LOG2E,
    add_dot,
    dot,
    log_sum_exp,
    loop,
    online_softmax,
    segment,
)


class Lists(NamedTuple):
    """What the walks read beside their operands. Learned tables are [TABLE_SIZE, HEADS], dense values [P, H], data [P]
    or [P, C]."""

    row_starts: Tensor  # int64 [S * M + 1]
    columns: Tensor  # int32 [P]
    key_starts: Tensor  # int64 [S * N + 1]
    key_rows: Tensor  # int32 [P]
    key_pairs: Tensor  # int32 [P]
    column_ids: Tensor | None  # int32 [N], of dropout
    stats: Tensor | None  # [B, M, HEADS, 2], pivot of exp and delta of every row, of backward
    rows_apart: int  # from the lists of one sequence to those of the next; 0: all have the same
    columns_apart: int
    B: int
    halvings: int  # that find a segment in a list
    # compile-time constants, as tl.constexpr
    WHOLE: bool  # the only segment is all columns
    FULL: bool  # the heads of a program fill its rows
    OFFSETS: tl.dtype  # of offsets of rows within a sequence
    TENSOR: bool  # the rows have 16 bits
    WIDTH: int  # of a head, D padded
    SLOTS: int  # columns of ``own``, a head each, at least as many as a program has heads


class Heads(NamedTuple):
    """The heads of a program, and its sequence."""

    b: tl.tensor
    first: tl.tensor
    slots: tl.tensor  # [SLOTS], heads; those beyond H repeat the last one
    exist: tl.tensor  # [SLOTS]


class Visited(NamedTuple):
    """Some pairs of each list, [BLOCK_M, BLOCK_N]."""

    pair: tl.tensor
    other: tl.tensor  # column, or row
    exist: tl.tensor


@triton.jit
def program_heads(x, lists, b, group, GROUP: tl.constexpr):
    offs = tl.arange(0, lists.SLOTS)
    slots = (group * GROUP + offs).to(tl.int32)
    exist = (slots < x.H) & (offs < GROUP)
    return Heads(b, group * GROUP, tl.minimum(slots, x.H - 1), exist)


@triton.jit
def _row_ptrs(x, lists, t, heads, rows, GROUP: tl.constexpr):
    """Rows [...] of t, all heads of a program, pointers [..., GROUP * WIDTH], and which numbers of a row exist."""
    offs = tl.arange(0, GROUP * lists.WIDTH)
    head = (heads.first + offs // lists.WIDTH).to(tl.int32)
    offs_d = offs % lists.WIDTH
    stride_b, stride_h, stride_row = t.strides[0], t.strides[1], t.strides[2]
    offsets = tl.minimum(head, x.H - 1).to(x.OFFSETS) * (stride_h // x.ALIGNMENT * x.ALIGNMENT) + offs_d * t.strides[3]
    start = t.ptr + heads.b * (stride_b // x.ALIGNMENT * x.ALIGNMENT)
    starts = rows.to(lists.OFFSETS) * (stride_row // x.ALIGNMENT * x.ALIGNMENT).to(lists.OFFSETS)
    return start + (tl.expand_dims(starts, -1) + offsets), (head < x.H) & (offs_d < x.D)


@triton.jit
def _own_slots(lists, GROUP: tl.constexpr):
    """Which numbers of a row belong to which slot, [GROUP * WIDTH, SLOTS]."""
    head = tl.arange(0, GROUP * lists.WIDTH) // lists.WIDTH
    return head[:, None] == tl.arange(0, lists.SLOTS)[None, :]


@triton.jit
def own_rows(x, lists, t, heads, rows, GROUP: tl.constexpr):
    """The program's rows [BLOCK_M] of t: [BLOCK_M, GROUP * WIDTH], spread out to [BLOCK_M, GROUP * WIDTH, SLOTS] for
    the tensor cores."""
    ptrs, exist = _row_ptrs(x, lists, t, heads, rows, GROUP)
    if lists.TENSOR:
        # loaded, not chosen from a row: of a load the compiler moves the change of layout out of the loop
        mine = (_own_slots(lists, GROUP) & exist[:, None])[None, :, :]
        ptrs, mine = tl.broadcast(ptrs[:, :, None], mine)
        own = tl.load(ptrs, mask=mine, other=0.0)
    else:
        own = tl.load(ptrs, mask=exist[None, :], other=0.0)
    if INTERPRET and own.dtype == tl.bfloat16:
        own = own.to(tl.float32)
    return own


@triton.jit
def visited_rows(x, lists, t, heads, visited, GROUP: tl.constexpr):
    """Rows of t that are visited, [BLOCK_M, BLOCK_N, GROUP * WIDTH]; any, which there is, where there is no pair."""
    ptrs, exist = _row_ptrs(x, lists, t, heads, visited.other, GROUP)
    rows = tl.load(ptrs) if lists.FULL else tl.load(ptrs, mask=exist[None, None, :], other=0.0)
    if INTERPRET and rows.dtype == tl.bfloat16:
        rows = rows.to(tl.float32)
    return rows


@triton.jit
def _spread(lists, numbers, GROUP: tl.constexpr):
    """A number of each head, [BLOCK_M, n, GROUP], for each of its row, [BLOCK_M, n, GROUP * WIDTH]."""
    rows: tl.constexpr = numbers.shape[0]
    n: tl.constexpr = numbers.shape[1]
    wide = tl.broadcast_to(numbers[:, :, :, None], [rows, n, GROUP, lists.WIDTH])
    return tl.reshape(wide, [rows, n, GROUP * lists.WIDTH])


@triton.jit
def row_products(x, lists, own, rows, GROUP: tl.constexpr):
    """Of own rows and visited ones, by head, [BLOCK_M, BLOCK_N, SLOTS]."""
    if lists.TENSOR:
        return dot(x, rows, own)
    else:
        product = tl.reshape(rows * own[:, None, :], [rows.shape[0], rows.shape[1], GROUP, lists.WIDTH])
        return tl.sum(product, axis=3)


@triton.jit
def no_sums(x, lists, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    if lists.TENSOR:
        return tl.zeros([BLOCK_M, GROUP * lists.WIDTH, lists.SLOTS], x.ACC_DTYPE)
    else:
        return tl.zeros([BLOCK_M, BLOCK_N, GROUP * lists.WIDTH], x.ACC_DTYPE)


@triton.jit
def _scaled(lists, sums, factor, GROUP: tl.constexpr):
    """sums times a factor of each row and head, [BLOCK_M, 1, SLOTS]."""
    if lists.TENSOR:
        return sums * factor
    else:
        return sums * _spread(lists, factor, GROUP)


@triton.jit
def add_rows(x, lists, sums, weights, rows, GROUP: tl.constexpr):
    """sums + visited rows times weights [BLOCK_M, BLOCK_N, SLOTS]."""
    if lists.TENSOR:
        return add_dot(sums, tl.permute(rows, (0, 2, 1)), weights.to(rows.dtype))
    else:
        return sums + _spread(lists, weights, GROUP) * rows


@triton.jit
def row_sums(lists, sums, GROUP: tl.constexpr):
    """What the sums come to, [BLOCK_M, GROUP * WIDTH]."""
    if lists.TENSOR:
        return tl.sum(tl.where(_own_slots(lists, GROUP)[None, :, :], sums, 0.0), axis=2)
    else:
        return tl.sum(sums, axis=1)


@triton.jit
def write_own(x, lists, t, heads, rows, exist, values, ACCUMULATE: tl.constexpr, GROUP: tl.constexpr):
    """t[rows] = values [BLOCK_M, GROUP * WIDTH], or +=; they are this program's alone."""
    ptrs, in_row = _row_ptrs(x, lists, t, heads, rows, GROUP)
    keep = exist[:, None] & in_row[None, :]
    if ACCUMULATE:
        values += tl.load(ptrs, mask=keep, other=0.0)
    tl.store(ptrs, values, mask=keep)


@triton.jit
def _first_from(lists, low, high, column):
    """Where the columns of lists low..high [BLOCK_M] reach ``column``."""
    for _ in loop(0, lists.halvings, 1):
        middle = (low + high) // 2
        below = tl.load(lists.columns + middle, mask=low < high, other=0) < column
        below = below & (low < high)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit
def list_segment(x, i):
    """(key_start, column_start, length) in 32 bits, as what a list names."""
    key_start, column_start, length = segment(x, i)
    return key_start.to(tl.int32), column_start.to(tl.int32), length


@triton.jit
def keys_of(lists, heads, row, exist, column_start, length):
    """Where the pairs of rows [BLOCK_M] with the columns of a segment begin and end."""
    starts = lists.row_starts + (heads.b * lists.rows_apart + row)
    begin = tl.load(starts, mask=exist, other=0).to(tl.int32)
    end = tl.load(starts + 1, mask=exist, other=0).to(tl.int32)
    if not lists.WHOLE:
        begin = _first_from(lists, begin, end, column_start)
        end = _first_from(lists, begin, end, column_start + length)
    return begin, end


@triton.jit
def visit_keys(x, lists, heads, begin, end, at, column_start, BLOCK_N: tl.constexpr):
    """Pairs at.. of rows, with their columns, or ``column_start`` beyond the last one; a padded one does not exist."""
    pair = (begin + at)[:, None] + tl.arange(0, BLOCK_N)[None, :]
    exist = pair < end[:, None]
    column = tl.load(lists.columns + pair, mask=exist, other=column_start)
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        hidden = tl.load(x.padding.ptr + heads.b * stride_b + column * stride_n, mask=exist, other=1)
        exist = exist & (hidden == 0)
    return Visited(pair, column, exist)


@triton.jit
def pair_scores(x, lists, product, heads, visited):
    """scale * product + bias, natural log; -inf where there is no pair."""
    s = product * x.scale
    pair, exist = visited.pair.to(tl.int64), visited.exist
    if x.FORM == "bucket":
        entry = tl.load(x.data.ptr + pair * x.data.strides[0], mask=exist, other=0).to(tl.int32)
        s += tl.load(x.learned.ptr + entry[:, :, None] * x.HEADS + heads.slots[None, None, :])
    elif x.FORM == "dense":
        ptrs = x.learned.ptr + (pair * x.learned.strides[0])[:, :, None]
        ptrs += heads.slots[None, None, :] * x.learned.strides[1]
        s += tl.load(ptrs, mask=exist[:, :, None], other=0.0).to(s.dtype)
    else:
        for c in tl.static_range(x.NUM_CHANNELS):
            weight = tl.load(x.learned.ptr + heads.slots * x.learned.strides[0] + c * x.learned.strides[1])
            channel = tl.load(x.data.ptr + pair * x.data.strides[0] + c * x.data.strides[1], mask=exist, other=0.0)
            s += channel.to(s.dtype)[:, :, None] * weight.to(s.dtype)[None, None, :]
    return tl.where(exist[:, :, None], s, -float("inf"))


@triton.jit
def is_dropped(x, lists, keys, columns, exist):
    """Of pairs with these row keys and columns, which broadcast to [BLOCK_M, BLOCK_N, SLOTS]."""
    ids = columns
    if lists.column_ids is not None:
        ids = tl.load(lists.column_ids + columns, mask=exist, other=0)
    return dropped(x, keys, ids)


@triton.jit
def _fold(
    x, lists, running, q, heads, keys, begin, end, at, key_start, column_start,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold pairs at.. of the rows into the running softmax; l is summed over its pairs in the end."""
    visited = visit_keys(x, lists, heads, begin, end, at, column_start, BLOCK_N)
    at_keys = Visited(visited.pair, visited.other - column_start + key_start, visited.exist)
    k = visited_rows(x, lists, x.k, heads, at_keys, GROUP)
    v = visited_rows(x, lists, x.v, heads, at_keys, GROUP)
    s = pair_scores(x, lists, row_products(x, lists, q, k, GROUP), heads, visited)
    m, p, rescale = online_softmax(x, running.m, s, 1)
    l = running.l * rescale + p
    if x.THRESHOLD > 0:  # kept p is scaled once, in out
        drop = is_dropped(x, lists, keys[:, None, :], visited.other[:, :, None], visited.exist[:, :, None])
        p = tl.where(drop, 0.0, p)
    return Running(m, l, add_rows(x, lists, _scaled(lists, running.acc, rescale, GROUP), p, v, GROUP))


@triton.jit
def _state_rows(x, lists, acc, heads, row, in_rows, GROUP: tl.constexpr):
    """Rows of the unnormalised output, pointers [BLOCK_M, GROUP * WIDTH], and which numbers exist."""
    offs = tl.arange(0, GROUP * lists.WIDTH)
    head, offs_d = heads.first + offs // lists.WIDTH, offs % lists.WIDTH
    ptrs = acc + (((heads.b * x.H + head) * x.M)[None, :] + row[:, None]) * x.D + offs_d[None, :]
    return ptrs, in_rows[:, None] & ((head < x.H) & (offs_d < x.D))[None, :]


@triton.jit
def _read_softmax(
    x, lists, softmax, state, heads, row, in_rows,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax so far; of l, the first pair has all."""
    in_state = in_rows[:, None] & heads.exist[None, :]
    first = (tl.arange(0, BLOCK_N) == 0)[None, :, None]
    m = tl.load(softmax.m + state, mask=in_state, other=-float("inf"))[:, None, :]
    l = tl.where(first, tl.load(softmax.l + state, mask=in_state, other=0.0)[:, None, :], 0.0)
    ptrs, exist = _state_rows(x, lists, softmax.acc, heads, row, in_rows, GROUP)
    acc = tl.load(ptrs, mask=exist, other=0.0)
    if lists.TENSOR:
        acc = tl.where(_own_slots(lists, GROUP)[None, :, :], acc[:, :, None], 0.0)
    else:
        acc = tl.where(first, acc[:, None, :], 0.0)
    return Running(m * LOG2E if x.FOLD else m, l, acc)


@triton.jit
def pairs_fwd(
    x, lists, softmax, num_blocks,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B * num_blocks * groups of heads); one program owns BLOCK_M query rows of GROUP heads, and takes BLOCK_N
    pairs of each list at a time."""
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    groups = x.HEADS // GROUP
    heads = program_heads(x, lists, pid // groups // num_blocks, pid % groups, GROUP)
    offs = pid // groups % num_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows, row = offs < x.M, tl.minimum(offs, x.M - 1)
    state = (heads.b * x.H + heads.slots)[None, :] * x.M + row[:, None]
    in_state = in_rows[:, None] & heads.exist[None, :]

    q = own_rows(x, lists, x.q, heads, row, GROUP)
    if FIRST:
        m = tl.full([BLOCK_M, 1, lists.SLOTS], -float("inf"), x.ACC_DTYPE)
        l = tl.zeros([BLOCK_M, BLOCK_N, lists.SLOTS], x.ACC_DTYPE)
        running = Running(m, l, no_sums(x, lists, BLOCK_M, BLOCK_N, GROUP))
    else:
        running = _read_softmax(x, lists, softmax, state, heads, row, in_rows, GROUP, BLOCK_N)
    keys = row_keys(x, heads.b, heads.slots[None, :], row[:, None])
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = list_segment(x, i)
        begin, end = keys_of(lists, heads, row, in_rows, column_start, length)
        for at in loop(0, tl.max(end - begin), BLOCK_N):
            running = _fold(x, lists, running, q, heads, keys, begin, end, at, key_start, column_start, GROUP, BLOCK_N)

    m, l, acc = running
    l = tl.sum(l, axis=1, keep_dims=True)
    if LAST:
        lse, l_safe = log_sum_exp(x, m, l)
        tl.store(softmax.lse + state, tl.reshape(lse, state.shape), mask=in_state)
        out = row_sums(lists, _scaled(lists, acc, (1.0 / l_safe) * x.KEEP_SCALE, GROUP), GROUP)
        write_own(x, lists, softmax.out, heads, row, in_rows, out, False, GROUP)
    else:
        m = m * LN2 if x.FOLD else m
        tl.store(softmax.m + state, tl.reshape(m, state.shape), mask=in_state)
        tl.store(softmax.l + state, tl.reshape(l, state.shape), mask=in_state)
        ptrs, exist = _state_rows(x, lists, softmax.acc, heads, row, in_rows, GROUP)
        tl.store(ptrs, row_sums(lists, acc, GROUP), mask=exist)
