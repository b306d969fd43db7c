"""Attention over listed pairs in tiles: blocks of rows, and the keys that any row of a block attends to.

    rows 0..15      | a  c  d  f |  ...        columns named by some row of the block, gathered; a tile has a number
    rows 16..31     | a  b  f  g |  ...        for each pair, and another where there is none

Nodes stand in the order of their clusters, so rows of a block name much the same keys: these are gathered once for all
of them, and scores are products on the tensor cores. What a tile computes beyond its pairs is masked. The equations,
and the softmax so far, are those of ``forward``; ``pairs_backward`` has the gradients. No atomics: every sum has one
order, and two runs agree.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from megagraph.kernels.dropout import dropped, row_keys
from megagraph.kernels.forward import Running, read_softmax, write_softmax
from megagraph.kernels.heads import HeadRows, heads_ptrs, load_heads
from megagraph.kernels.tile import (
    MASKED_BUCKET,
    add_dot,
    dot,
    log_sum_exp,
    loop,
    online_softmax,
    segment,
)


class Walk(NamedTuple):
    """The tiles of a relation, as ``pair_tiles`` makes them: of blocks of rows, or of blocks of columns."""

    starts: Tensor  # int32 [S * blocks + 1], the first tile of every block
    others: Tensor  # int32 [T * BLOCK_N], the columns, or rows, of every tile, ascending in a block
    numbers: Tensor  # [T, BLOCK_M, BLOCK_N]: uint8, bucket of each pair, 255 = none; or int32, which pair, -1 = none
    column_ids: Tensor | None  # int32 [N], of dropout
    blocks: int  # of a sequence
    apart: int  # from the blocks of one sequence to those of the next; 0: all have the same
    B: int
    halvings: int  # that find a segment in a block
    WHOLE: bool  # the only segment is all columns; a compile-time constant, as tl.constexpr


class Tile(NamedTuple):
    """Some queries of a block, and some keys, either of them gathered."""

    number: tl.tensor  # [BLOCK_M, BLOCK_N]
    other: tl.tensor  # [BLOCK_N], columns or rows


class Program(NamedTuple):
    """Where a program is."""

    b: tl.tensor
    heads: tl.tensor  # [GROUP]; those beyond H repeat the last one
    in_heads: tl.tensor  # [GROUP]


@triton.jit
def heads_dot(x, a, b):
    """``dot`` of several heads; of one, warps share the columns, where each would compute all of them."""
    if a.shape[0] == 1:
        product = dot(x, tl.reshape(a, a.shape[1:]), tl.reshape(b, b.shape[1:]))
        return tl.reshape(product, [1, a.shape[1], b.shape[2]])
    else:
        return dot(x, a, b)


@triton.jit
def add_heads_dot(x, acc, p, a):
    """``add_dot`` of several heads; of one, warps share the columns, as in :func:`heads_dot`."""
    if a.shape[0] == 1:
        total = add_dot(x, tl.reshape(acc, acc.shape[1:]), tl.reshape(p, p.shape[1:]), tl.reshape(a, a.shape[1:]))
        return tl.reshape(total, acc.shape)
    else:
        return add_dot(x, acc, p, a)


@triton.jit
def program_of(x, b, group, GROUP: tl.constexpr):
    offs_h = (group * GROUP + tl.arange(0, GROUP)).to(tl.int32)
    return Program(b, tl.minimum(offs_h, x.H - 1), offs_h < x.H)


@triton.jit
def block_tiles(walk, b, block):
    """The first tile of a block, and the first of the next one; in 64 bits, as they are multiplied."""
    starts = walk.starts + b * walk.apart + block
    return tl.load(starts).to(tl.int64), tl.load(starts + 1).to(tl.int64)


@triton.jit
def _first_from(walk, low, high, column, at, BLOCK_N: tl.constexpr):
    """The first of the tiles low..high whose column ``at`` is not below ``column``."""
    for _ in loop(0, walk.halvings, 1):
        middle = (low + high) // 2
        here = low < high
        below = here & (tl.load(walk.others + middle * BLOCK_N + at, mask=here, other=0) < column)
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    return low


@triton.jit
def segment_tiles(walk, first, last, column_start, length, BLOCK_N: tl.constexpr):
    """Which of the tiles first..last have columns of a segment; all of them where ``walk`` is WHOLE."""
    if not walk.WHOLE:
        first = _first_from(walk, first, last, column_start, BLOCK_N - 1, BLOCK_N)
        last = _first_from(walk, first, last, column_start + length, 0, BLOCK_N)
    return first, last


@triton.jit
def list_segment(x, i):
    """(key_start, column_start, length) in 32 bits, as what a tile names."""
    key_start, column_start, length, _ = segment(x, i)
    return key_start.to(tl.int32), column_start.to(tl.int32), length


@triton.jit
def first_tile(walk, first, last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first tile, if there is any. Tiles are loaded one ahead: their rows wait for them, and a load of bytes just
    before a product makes the compiler arrange its operands for bytes."""
    return load_tile(walk, tl.where(first < last, first, 0), BLOCK_M, BLOCK_N)


@triton.jit
def load_tile(walk, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + offs_n[None, :]
    number = tl.load(walk.numbers + tile * (BLOCK_M * BLOCK_N) + offs)
    return Tile(number, tl.load(walk.others + tile * BLOCK_N + offs_n))


@triton.jit
def hide(number, keep):
    """The numbers of a tile, those of pairs that do not exist where not ``keep``."""
    return tl.where(keep, number, MASKED_BUCKET if number.dtype == tl.uint8 else -1)


@triton.jit
def hide_columns(x, walk, b, visited, column_start, length):
    """The tile without columns of padding, and of other segments, which are told as the first of this one."""
    number, column = visited
    if not walk.WHOLE:
        inside = (column >= column_start) & (column < column_start + length)
        column = tl.where(inside, column, column_start)
        number = hide(number, inside[None, :])
    if x.padding is not None:
        stride_b, stride_n = x.padding.strides
        number = hide(number, (tl.load(x.padding.ptr + b * stride_b + column * stride_n) == 0)[None, :])
    return Tile(number, column)


@triton.jit
def pair_scores(x, qk, heads, number):
    """scale * qk + bias [GROUP, BLOCK_M, BLOCK_N], natural log; -inf where there is no pair. A table is [TABLE_SIZE,
    HEADS], with -inf at 255; dense values are [P, H], channels [P, C]."""
    s = qk * x.scale
    if x.FORM == "bucket":
        s += tl.load((x.learned.ptr + heads[:, None, None]) + number.to(tl.int32)[None, :, :] * x.HEADS)
    elif x.FORM == "dense":
        ptrs = x.learned.ptr + (number.to(tl.int64) * x.learned.strides[0])[None, :, :]
        ptrs += (heads * x.learned.strides[1])[:, None, None]
        s += tl.load(ptrs, mask=(number >= 0)[None, :, :], other=-float("inf")).to(s.dtype)
    else:
        ptrs = x.data.ptr + number.to(tl.int64) * x.data.strides[0]
        for c in tl.static_range(x.NUM_CHANNELS):
            weight = tl.load(x.learned.ptr + heads * x.learned.strides[0] + c * x.learned.strides[1]).to(s.dtype)
            channel = tl.load(ptrs + c * x.data.strides[1], mask=number >= 0, other=0.0).to(s.dtype)
            s += weight[:, None, None] * channel[None, :, :]
        s = tl.where((number >= 0)[None, :, :], s, -float("inf"))
    return s


@triton.jit
def is_dropped(x, walk, keys, column):
    """Whether dropout drops a pair, of row keys and columns, both [GROUP or 1, BLOCK_M or 1, BLOCK_N or 1]."""
    if walk.column_ids is not None:
        column = tl.load(walk.column_ids + column)
    return dropped(x, keys, column)


@triton.jit
def _fold_tile(x, walk, running, q, at, keys, visited, place):
    """Fold the pairs of a tile into the running softmax."""
    key_start, column_start, length = place
    visited = hide_columns(x, walk, at.b, visited, column_start, length)
    key = visited.other - column_start + key_start
    of_keys = HeadRows(at.b, at.heads, 0, key)
    k = load_heads(x, x.k, of_keys, 0, False)
    v = load_heads(x, x.v, of_keys, 0, False)
    s = pair_scores(x, heads_dot(x, q, tl.permute(k, (0, 2, 1))), at.heads, visited.number)
    m, p, rescale = online_softmax(x, running.m, s)
    l = running.l * rescale + tl.sum(p, axis=2, keep_dims=True)
    if x.THRESHOLD > 0:  # kept p is scaled once, in out
        p = tl.where(is_dropped(x, walk, keys[:, :, None], visited.other[None, None, :]), 0.0, p)
    return Running(m, l, add_heads_dot(x, running.acc * rescale, p, v))


@triton.jit
def pairs_fwd(
    x, walk, softmax,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (B * blocks * groups of heads); one program owns a block of BLOCK_M query rows of GROUP heads."""
    pid = tl.program_id(0).to(tl.int64)  # 64-bit before the first multiply by a stride
    groups = x.HEADS // GROUP
    at = program_of(x, pid // groups // walk.blocks, pid % groups, GROUP)
    block = pid // groups % walk.blocks
    row, offs = block * BLOCK_M, tl.arange(0, BLOCK_M)
    offs_m = tl.minimum(offs, x.M - 1 - row).to(tl.int32)  # rows beyond M repeat the last one, without pairs
    state = (at.b * x.H + at.heads)[:, None, None] * x.M + (row + offs_m)[None, :, None]
    in_state = at.in_heads[:, None, None] & (offs < x.M - row)[None, :, None]
    offs_d = tl.arange(0, x.BLOCK_D)[None, None, :]
    in_acc = in_state & (offs_d < x.D)

    of_rows = HeadRows(at.b, at.heads, row, offs_m)
    q = load_heads(x, x.q, of_rows, x.M, False)
    running = read_softmax(x, softmax, state, offs_d, in_state, in_acc, FIRST)
    keys = row_keys(x, at.b, at.heads[:, None], (row + offs_m)[None, :])
    begin, end = block_tiles(walk, at.b, block)
    for i in loop(0, x.num_segments, 1):
        key_start, column_start, length = list_segment(x, i)
        first, last = segment_tiles(walk, begin, end, column_start, length, BLOCK_N)
        ahead = first_tile(walk, first, last, BLOCK_M, BLOCK_N)
        for tile in loop(first, last, 1):
            visited = ahead
            ahead = load_tile(walk, tl.minimum(tile + 1, last - 1), BLOCK_M, BLOCK_N)
            running = _fold_tile(x, walk, running, q, at, keys, visited, (key_start, column_start, length))

    if LAST:
        m, l, acc = running
        lse, l_safe = log_sum_exp(x, m, l)
        tl.store(softmax.lse + state, lse, mask=in_state)
        ptrs = heads_ptrs(x, softmax.out, of_rows, x.BLOCK_D)
        tl.store(ptrs, acc * (x.KEEP_SCALE / l_safe), mask=in_acc)
    else:
        write_softmax(x, softmax, state, offs_d, in_state, in_acc, running)
