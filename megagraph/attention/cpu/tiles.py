"""The CPU path: one attention step in tiles of scores, forward and backward.

The same contract as the Triton launchers: scores of the visiting keys are folded into a running max m, sum l and
output acc (FlashAttention, arXiv:2205.14135, Alg. 1; logarithms are natural here), a compact bias is read pair by
pair, never expanded, and the backward recomputes the scores from lse.

A tile has some queries and keys of one head. Its scores stay in the cache from the product that makes them to those
that take them, and each thread works on tiles of its own from start to end, so that only rows of q, k, v and the bias
come from memory. The seven products of a tile are made of ``lanes.product_16``; they are most of the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.cpu.dropout import pair_hash
from megagraph.attention.cpu.simd import (
    LANES,
    PRODUCT_ROWS,
    add_up,
    counting,
    exp,
    fetch,
    keep_from,
    largest_of,
    load,
    look_up,
    maximum,
    multiply_add,
    product_8,
    product_16,
    splat,
    store,
    sum_of,
    transposed,
)
from megagraph.attention.cpu.views import (
    BUCKET,
    DENSE,
    PROJECTED,
    BiasArrays,
    Plane,
    bias_arrays,
    place_of,
    plane,
    side_by_side,
)
from megagraph.attention.dropout import dropout_threshold, row_keys
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.threads import CHUNKS, in_threads

_MOST_ROWS, _MOST_KEYS = 96, 240  # of a tile; compiled in
TILE_ROWS, TILE_KEYS = _MOST_ROWS, _MOST_KEYS  # two tiles of fp32 scores take 184 kB
_ROWS_OF_KEYS = 2 * TILE_ROWS  # that some keys visit before the next: all heads find their bias in the cache
_WIDE = 2 * LANES
_SCORES_PER_THREAD = 1 << 15


class _Pairs(NamedTuple):
    """What is known of pairs of a row and a column beside their scores."""

    bias: BiasArrays
    padding: np.ndarray  # bool [B, N], True = masked, or none
    row_keys: Plane  # uint32 [B, H, M], or none
    threshold: np.uint32  # a hash below it drops a pair


class _Work(NamedTuple):
    """What a call computes."""

    items: np.ndarray  # int64 [I, numbers], the shares of threads
    tiles: np.ndarray  # int64 [T, 3]: first key, first column, keys
    tile_rows: int
    rows_of_keys: int  # that some keys visit before the next
    B: int
    M: int
    D: int
    scale: float  # of q k^T
    keep: float  # of out, or of d_out, where dropout keeps a pair


class _State(NamedTuple):
    """Of the softmax, as ``step.State`` has it."""

    m: Plane
    l: Plane
    acc: Plane
    out: Plane
    lse: Plane


class _Sums(NamedTuple):
    """Gradients that tiles add to."""

    dq: Plane  # [part * B + b, H, M', D']: rows and D rounded up, a plane for each part of the keys
    dk: Plane
    dv: Plane
    dense: Plane  # of a dense bias, which is written unless ``dense_added``
    dense_added: bool
    learned: bool  # whether the gradient of the bias is wanted


def _up_to(size, multiple):
    return (size + multiple - 1) // multiple * multiple


_up = jit()(_up_to)


@jit()
def _copy_row(x, start, D, factor, out, to):
    """factor * x[start..start + D] into out[to..]."""
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        store(out, to + d, load(x, start + d) * splat(factor))
    for d in range(whole, D):
        out[to + d] = x[start + d] * factor


@jit()
def _copy_rows(x, at, n, D, out, to, width):
    """x [n, D] from the row ``at`` of a plane on into out [n, width]."""
    memory, start = x.memory, place_of(x, at)
    one = memory.dtype.type(1)
    for i in range(n):
        _copy_row(memory, start + i * x.stride_row, D, one, out, to + i * width)


@jit()
def _copy_panels(x, at, n, D, factor, out, rows):
    """factor * x [n, D] into panels of 16 columns, out [panel, rows, 16]: a product reads one panel many times, and
    rows as far apart as those of x would share a few places of the cache."""
    memory, start, stride = x.memory, place_of(x, at), x.stride_row
    whole, panel = D // LANES * LANES, rows * _WIDE
    for i in range(n):
        row, to = start + i * stride, i * _WIDE
        for d in range(0, whole, LANES):
            store(out, d // _WIDE * panel + to + d % _WIDE, load(memory, row + d) * splat(factor))
        for d in range(whole, D):
            out[d // _WIDE * panel + to + d % _WIDE] = memory[row + d] * factor


@jit()
def _add_rows(x, n, D, width, out, at):
    """Rows of a plane from ``at`` on [n, D] += x of x [n, width]."""
    memory, start, stride = out.memory, place_of(out, at), out.stride_row
    whole = D // LANES * LANES
    for i in range(n):
        row, to = i * width, start + i * stride
        for d in range(0, whole, LANES):
            store(memory, to + d, load(memory, to + d) + load(x, row + d))
        for d in range(whole, D):
            memory[to + d] += x[row + d]


@jit()
def _copy_columns(x, at, n, D, factor, out, width, padded):
    """factor * x [n, D] into out [D, width], with zeros in columns n to ``padded``."""
    memory, start, stride = x.memory, place_of(x, at), x.stride_row
    whole, deep = n // LANES * LANES, D // LANES * LANES
    for d in range(0, deep, LANES):
        for i in range(0, whole, LANES):
            transposed(memory, start + i * stride + d, stride, out, d * width + i, width)
    for d in range(D):
        for i in range(whole if d < deep else 0, n):
            out[d * width + i] = memory[start + i * stride + d]
        for i in range(n, padded):
            out[d * width + i] = 0
    if factor != 1:
        for d in range(D):
            for i in range(0, padded, LANES):
                store(out, d * width + i, load(out, d * width + i) * splat(factor))


@jit()
def _scores(rows, keys, D, m, n, out, wanted, place):
    """out [m, n] = rows^T keys of rows [D, m] and keys [D, n], both of a tile's width.

    Meanwhile the tile at (b, h, row, column) of the plane wanted next, unless that is empty, comes into the cache.
    """
    ahead, stride, at = wanted.memory, wanted.stride_row, place_of(wanted, place) + place[3]
    some_ahead = len(ahead) > 0
    for j in range(0, n, _WIDE):
        for i in range(0, m, PRODUCT_ROWS):
            if some_ahead:
                for row in range(i, i + PRODUCT_ROWS):
                    fetch(ahead, at + row * stride + j)
            product_16(rows, i, 1, _MOST_ROWS, D, keys, j, _MOST_KEYS, out, i * _MOST_KEYS + j, _MOST_KEYS, False)


@jit()
def _add_to_rows(s, x, m, n, width, out, at):
    """out [m, width] += s x of s [m, n] and x [n, width], in panels."""
    wide = width // _WIDE * _WIDE
    for i in range(0, m, PRODUCT_ROWS):
        row, to = i * _MOST_KEYS, at + i * width
        for d in range(0, wide, _WIDE):
            product_16(s, row, _MOST_KEYS, 1, n, x, d * _MOST_KEYS, _WIDE, out, to + d, width, True)
        if wide < width:
            product_8(s, row, _MOST_KEYS, 1, n, x, wide * _MOST_KEYS, _WIDE, out, to + wide, width, True)


@jit()
def _add_to_keys(s, x, m, n, width, out):
    """out [n, width] += s^T x of s [m, n] and x [m, width], in panels."""
    wide = width // _WIDE * _WIDE
    for d in range(0, wide, _WIDE):
        for j in range(0, n, PRODUCT_ROWS):
            product_16(s, j, 1, _MOST_KEYS, m, x, d * _MOST_ROWS, _WIDE, out, j * width + d, width, True)
    if wide < width:
        for j in range(0, n, PRODUCT_ROWS):
            product_8(s, j, 1, _MOST_KEYS, m, x, wide * _MOST_ROWS, _WIDE, out, j * width + wide, width, True)


@jit()
def _add_bias(s, m, n, padded, pairs, place):
    """Add the bias to the scores of m rows and n keys; -inf where masked, and on to ``padded``."""
    b, h, row, column = place
    # arrays are taken out of their tuples once for a tile: each time counts a reference
    (buckets, channels, learned, dense, mask, strides), padding = pairs.bias, pairs.padding
    dense, dense_at, dense_stride = dense.memory, place_of(dense, place) + column, dense.stride_row
    whole = n // LANES * LANES
    for i in range(m):
        o, at = i * _MOST_KEYS, b * strides.b + (row + i) * strides.m + column
        if strides.form == BUCKET:
            table = h * strides.num_learned
            for j in range(0, whole, LANES):
                store(s, o + j, load(s, o + j) + look_up(learned, table, buckets, at + j))
            for j in range(whole, n):
                s[o + j] += learned[table + buckets[at + j]]
        elif strides.form == PROJECTED:
            weight, in_fours = h * strides.num_learned, strides.num_learned // 4 * 4
            for c in range(0, in_fours, 4):  # scores are loaded and stored once for four channels
                w0, w1 = splat(learned[weight + c]), splat(learned[weight + c + 1])
                w2, w3 = splat(learned[weight + c + 2]), splat(learned[weight + c + 3])
                at0 = at + c * strides.c
                at1, at2, at3 = at0 + strides.c, at0 + 2 * strides.c, at0 + 3 * strides.c
                for j in range(0, whole, LANES):
                    sum_ = multiply_add(w1, load(channels, at1 + j), w0 * load(channels, at0 + j))
                    sum_ = multiply_add(w3, load(channels, at3 + j), multiply_add(w2, load(channels, at2 + j), sum_))
                    store(s, o + j, load(s, o + j) + sum_)
            for c in range(in_fours, strides.num_learned):
                factor, here = splat(learned[weight + c]), at + c * strides.c
                for j in range(0, whole, LANES):
                    store(s, o + j, multiply_add(factor, load(channels, here + j), load(s, o + j)))
            for c in range(strides.num_learned):
                for j in range(whole, n):
                    s[o + j] += learned[weight + c] * channels[at + c * strides.c + j]
        elif strides.form == DENSE:
            at = dense_at + i * dense_stride
            for j in range(0, whole, LANES):
                store(s, o + j, load(s, o + j) + load(dense, at + j))
            for j in range(whole, n):
                s[o + j] += dense[at + j]
        if len(mask):
            at = b * strides.mask_b + (row + i) * strides.mask_m + column
            for j in range(n):
                if mask[at + j]:
                    s[o + j] = -np.inf
        if len(padding):
            for j in range(n):
                if padding[b, column + j]:
                    s[o + j] = -np.inf
        for j in range(n, padded):
            s[o + j] = -np.inf


@jit()
def _add_bias_gradient(ds, m, n, bias, d_lanes, sums, place):
    """Add the share of a tile to d_lanes [R, 8], the sum of whose lanes is wanted; write or add it to a dense plane."""
    b, _, row, column = place
    buckets, channels, _, _, _, strides = bias
    d_dense, d_dense_at, d_dense_stride = sums.dense.memory, place_of(sums.dense, place) + column, sums.dense.stride_row
    added = sums.dense_added
    whole, odd = n // LANES * LANES, n // _WIDE * _WIDE
    for i in range(m):
        o, at = i * _MOST_KEYS, b * strides.b + (row + i) * strides.m + column
        if strides.form == BUCKET:
            for j in range(0, whole, LANES):
                add_up(d_lanes, buckets, at + j, load(ds, o + j))
            for j in range(whole, n):
                d_lanes[LANES * np.intp(buckets[at + j])] += ds[o + j]
        elif strides.form == PROJECTED:
            for c in range(strides.num_learned):
                here = at + c * strides.c
                # a row's own sum, so that rounding does not grow with the number of pairs;
                # in two parts side by side, or each addition would wait for the one before
                s0 = s1 = splat(d_lanes.dtype.type(0))
                for j in range(0, odd, _WIDE):
                    s0 = multiply_add(load(ds, o + j), load(channels, here + j), s0)
                    s1 = multiply_add(load(ds, o + j + LANES), load(channels, here + j + LANES), s1)
                if odd < whole:
                    s0 = multiply_add(load(ds, o + odd), load(channels, here + odd), s0)
                store(d_lanes, LANES * c, load(d_lanes, LANES * c) + (s0 + s1))
                for j in range(whole, n):
                    d_lanes[LANES * c] += ds[o + j] * channels[here + j]
        elif strides.form == DENSE:
            at = d_dense_at + i * d_dense_stride
            for j in range(0, whole, LANES):
                store(d_dense, at + j, load(d_dense, at + j) + load(ds, o + j) if added else load(ds, o + j))
            for j in range(whole, n):
                d_dense[at + j] = d_dense[at + j] + ds[o + j] if added else ds[o + j]


@jit()
def _add_lanes(d_lanes, size, out, at):
    """out [size] += the sums of d_lanes [size, 8], which become 0."""
    zero = d_lanes.dtype.type(0)
    for r in range(size):
        sum_ = zero
        for lane in range(LANES):
            sum_ += d_lanes[LANES * r + lane]
            d_lanes[LANES * r + lane] = zero
        out[at + r] += sum_


@jit()
def _fold_rows(s, m, padded, running, at, width, pairs, place):
    """Scores s [m, padded] become exponentials; the running maxima, sums and total of their rows, from ``at`` on,
    follow, all but the product."""
    maxima, sums, acc = running
    row_keys, key_at, threshold = pairs.row_keys.memory, place_of(pairs.row_keys, place), pairs.threshold
    column = place[3]
    for i in range(m):
        o, here = i * _MOST_KEYS, at + i
        largest, sum_ = splat(maxima[here]), splat(s.dtype.type(0))
        for j in range(0, padded, LANES):
            largest = maximum(largest, load(s, o + j))
        highest = largest_of(largest)
        pivot = highest if highest > -np.inf else s.dtype.type(0)  # of a row that has met no valid key
        for j in range(0, padded, LANES):
            p = exp(load(s, o + j) - splat(pivot))
            sum_ = sum_ + p
            store(s, o + j, p)
        rescale = np.exp(maxima[here] - pivot)
        maxima[here] = highest
        sums[here] = sums[here] * rescale + sum_of(sum_)
        if len(row_keys):
            for j in range(0, padded, LANES):
                hashed = pair_hash(splat(row_keys[key_at + i]), counting(np.uint32(column + j)))
                store(s, o + j, keep_from(load(s, o + j), hashed, splat(threshold)))
        if rescale != 1:
            for d in range(here * width, (here + 1) * width, LANES):
                store(acc, d, load(acc, d) * splat(rescale))


@jit()
def _softmax_backward(s, dp, m, padded, lse, delta, pairs, place):
    """dp becomes ds = p * (keep * dp - delta), then s keep * p, of p = exp(s - lse); both [m, padded]."""
    lse, lse_at, lse_stride = lse.memory, place_of(lse, place), lse.stride_row
    delta, delta_at, delta_stride = delta.memory, place_of(delta, place), delta.stride_row
    row_keys, key_at, threshold = pairs.row_keys.memory, place_of(pairs.row_keys, place), pairs.threshold
    column = place[3]
    hashed = splat(np.uint32(0))
    for i in range(m):
        pivot, shift = lse[lse_at + i * lse_stride], splat(delta[delta_at + i * delta_stride])
        pivot = splat(pivot if pivot > -np.inf else s.dtype.type(0))
        for j in range(0, padded, LANES):
            o = i * _MOST_KEYS + j
            p, g = exp(load(s, o) - pivot), load(dp, o)
            if len(row_keys):
                hashed = pair_hash(splat(row_keys[key_at + i]), counting(np.uint32(column + j)))
                g = keep_from(g, hashed, splat(threshold))
                store(s, o, keep_from(p, hashed, splat(threshold)))
            else:
                store(s, o, p)
            store(dp, o, p * (g - shift))


@jit(nogil=True)
def _forward(first, last, work, inputs, state, is_first, is_last, pairs):
    """Items (b, h, h_end, row, row_end), over all tiles of keys."""
    q, k, v = inputs
    items, tiles, D = work.items, work.tiles, work.D
    dtype, width = q.memory.dtype, _up(D, LANES)
    one, dense = dtype.type(1), pairs.bias.dense
    q_t, k_t = np.zeros(D * _MOST_ROWS, dtype), np.zeros(D * _MOST_KEYS, dtype)
    s, v_rows = np.zeros(_MOST_ROWS * _MOST_KEYS, dtype), np.zeros(_MOST_KEYS * _up(D, _WIDE), dtype)
    heads = rows = 0
    for item in range(first, last):
        heads = max(heads, items[item, 2] - items[item, 1])
        rows = max(rows, _up(items[item, 4] - items[item, 3], PRODUCT_ROWS))
    maxima, sums = np.zeros(heads * rows, dtype), np.zeros(heads * rows, dtype)
    total = np.zeros(heads * rows * width, dtype)
    for item in range(first, last):
        b, h, h_end, first_row, end = items[item]
        maxima[:] = -np.inf
        sums[:] = 0
        total[:] = 0
        if not is_first:
            for head in range(h, h_end):
                at, num, carried = (head - h) * rows, end - first_row, (b, head, first_row)
                _copy_rows(state.m, carried, num, 1, maxima, at, 1)
                _copy_rows(state.l, carried, num, 1, sums, at, 1)
                _copy_rows(state.acc, carried, num, D, total, at * width, width)
        for tile in range(len(tiles)):
            key, column, n = tiles[tile]
            padded = _up(n, _WIDE)
            for head in range(h, h_end):
                _copy_columns(k, (b, head, key), n, D, one, k_t, _MOST_KEYS, padded)
                _copy_panels(v, (b, head, key), n, D, one, v_rows, _MOST_KEYS)
                for row in range(first_row, end, work.tile_rows):
                    num, at = min(work.tile_rows, end - row), (head - h) * rows + row - first_row
                    full, place = _up(num, PRODUCT_ROWS), (b, head, row, column)
                    _copy_columns(q, place, num, D, work.scale, q_t, _MOST_ROWS, _up(full, LANES))
                    _scores(q_t, k_t, D, full, padded, s, dense, place)
                    _add_bias(s, num, n, padded, pairs, place)
                    _fold_rows(s, num, padded, (maxima, sums, total), at, width, pairs, place)
                    _add_to_rows(s, v_rows, full, n, width, total, at * width)
        for head in range(h, h_end):
            for row in range(first_row, end):
                at, carried = (head - h) * rows + row - first_row, (b, head, row)
                if is_last:
                    state.lse.memory[place_of(state.lse, carried)] = maxima[at] + np.log(sums[at])
                    factor = one / (sums[at] * work.keep) if sums[at] != 0 else one
                    _copy_row(total, at * width, D, factor, state.out.memory, place_of(state.out, carried))
                else:
                    state.m.memory[place_of(state.m, carried)] = maxima[at]
                    state.l.memory[place_of(state.l, carried)] = sums[at]
                    _copy_row(total, at * width, D, one, state.acc.memory, place_of(state.acc, carried))


@jit()
def _visit(b, h, rows, keys, part, work, inputs, pairs, sums, scratch):
    """What rows (first, end) of a head and the keys of a tile add to all gradients."""
    (first_row, end), (key, column, n), (q, k, v, d_out, lse, delta) = rows, keys, inputs
    D, dq, dense, d_dense = work.D, sums.dq, pairs.bias.dense, sums.dense
    (q_t, q_rows, d_out_t, d_out_rows), (k_t, k_rows, v_t, dk_rows, dv_rows), (s, dp), d_lanes = scratch
    one, width, padded = s.dtype.type(1), _up(D, LANES), _up(n, _WIDE)
    of_keys = (b, h, key)
    _copy_columns(k, of_keys, n, D, one, k_t, _MOST_KEYS, padded)
    _copy_columns(v, of_keys, n, D, one, v_t, _MOST_KEYS, padded)
    _copy_panels(k, of_keys, n, D, work.scale, k_rows, _MOST_KEYS)
    dk_rows[:] = 0
    dv_rows[:] = 0
    for row in range(first_row, end, work.tile_rows):
        num, place = min(work.tile_rows, end - row), (b, h, row, column)
        full = _up(num, PRODUCT_ROWS)
        _copy_columns(q, place, num, D, work.scale, q_t, _MOST_ROWS, _up(full, LANES))
        _copy_panels(q, place, num, D, work.scale, q_rows, _MOST_ROWS)
        _copy_columns(d_out, place, num, D, work.keep, d_out_t, _MOST_ROWS, _up(full, LANES))
        _copy_panels(d_out, place, num, D, work.keep, d_out_rows, _MOST_ROWS)
        _scores(q_t, k_t, D, full, padded, s, dense, place)
        _scores(d_out_t, v_t, D, full, padded, dp, d_dense, place)
        _add_bias(s, num, n, padded, pairs, place)
        _softmax_backward(s, dp, num, padded, lse, delta, pairs, place)
        if sums.learned:
            _add_bias_gradient(dp, num, n, pairs.bias, d_lanes, sums, place)
        _add_to_keys(s, d_out_rows, num, n, width, dv_rows)
        _add_to_keys(dp, q_rows, num, n, width, dk_rows)
        _add_to_rows(dp, k_rows, full, n, width, dq.memory, place_of(dq, (part, h, row)))
    _add_rows(dk_rows, n, D, width, sums.dk, of_keys)
    _add_rows(dv_rows, n, D, width, sums.dv, of_keys)


@jit(nogil=True)
def _backward(first, last, work, inputs, pairs, sums, d_learned):
    """Items (b, b_end, h, h_end, tile, tile_end, part), over all rows; d_learned [H, R], flat, of a table or weight."""
    dtype, wide, num_learned = d_learned.dtype, _up(work.D, _WIDE), pairs.bias.at.num_learned
    room = _MOST_ROWS * wide
    of_rows = np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype)
    # a product reads and writes up to a multiple of its rows
    room = (_MOST_KEYS + PRODUCT_ROWS) * wide
    of_keys = (np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype),
               np.zeros(room, dtype))  # fmt: skip
    room = _MOST_ROWS * _MOST_KEYS + PRODUCT_ROWS
    of_pairs = np.zeros(room, dtype), np.zeros(room, dtype)
    d_lanes = np.zeros(LANES * num_learned, dtype)
    scratch = of_rows, of_keys, of_pairs, d_lanes
    tiles = work.tiles
    for item in range(first, last):
        b_first, b_end, h, h_end, tile_first, tile_end, part = work.items[item]
        for b in range(b_first, b_end):
            for row in range(0, work.M, work.rows_of_keys):
                rows = row, min(row + work.rows_of_keys, work.M)
                for tile in range(tile_first, tile_end):
                    for head in range(h, h_end):
                        keys = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
                        _visit(b, head, rows, keys, part * work.B + b, work, inputs, pairs, sums, scratch)
                        _add_lanes(d_lanes, num_learned, d_learned, head * num_learned)


def _even(length: int, most: int, multiple: int) -> int:
    """The size of as few parts as there can be, about equal, of at most ``most``."""
    size = math.ceil(length / math.ceil(length / most))
    return min(most, _up_to(size, multiple))


def _parts(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _tiles(step: Step) -> np.ndarray:
    """(first key, first column, keys) of every tile; none straddles a segment."""
    tiles = [
        (key + start, column + start, end - start)
        for key, column, length in step.segments
        if length
        for start, end in _parts(length, _even(length, TILE_KEYS, _WIDE))
    ]
    return np.array(tiles, np.int64).reshape(-1, 3)


def _tile_rows(M: int) -> int:
    return _even(min(M, _ROWS_OF_KEYS), TILE_ROWS, PRODUCT_ROWS)


def _items(*axes: Iterable[tuple[int, ...]]) -> np.ndarray:
    """Every combination, in order, as one row of numbers."""
    return np.array([list(itertools.chain(*item)) for item in itertools.product(*axes)], np.int64)


def _pairs(step: Step, q: Tensor, compute: torch.dtype) -> _Pairs:
    keys = None
    if step.dropout_key is not None:
        row_ids = torch.arange(q.shape[2]) if step.row_ids is None else step.row_ids
        keys = row_keys(step.dropout_key, q.shape[1], row_ids).contiguous()
    of_rows = plane(keys, torch.int32)
    of_rows = of_rows._replace(memory=of_rows.memory.view(np.uint32))
    padding = torch.empty(0, 0, dtype=torch.bool) if step.key_padding_mask is None else step.key_padding_mask
    threshold = np.uint32(dropout_threshold(step.dropout_p))
    return _Pairs(bias_arrays(step, compute), padding.contiguous().numpy(), of_rows, threshold)


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    """Fold the visiting keys k, v [B, H, n, D] into the state of q [B, H, M, D], or into its result."""
    compute = torch.promote_types(q.dtype, torch.float32)
    number = torch.empty(0, dtype=compute).numpy().dtype.type
    (B, H, M, D), tiles = q.shape, _tiles(step)
    out = state.out
    if out is not None:
        out = out if out.dtype == compute and out.stride(-1) == 1 else torch.empty(out.shape, dtype=compute)
    inputs = tuple(plane(x.to(compute), compute) for x in (q, k, v))
    planes = _State(*(plane(x, compute) for x in (state.m, state.l, state.acc, out, state.lse)))
    pairs = _pairs(step, q, compute)
    keep = 1.0 if step.dropout_key is None else 1.0 - step.dropout_p
    rows = _parts(M, _ROWS_OF_KEYS)
    groups = math.ceil(2 * CHUNKS * torch.get_num_threads() / (B * len(rows)))
    items = _items(((b,) for b in range(B)), _parts(H, math.ceil(H / groups)), rows)
    costs = (items[:, 2] - items[:, 1]) * (items[:, 4] - items[:, 3]) * max(int(tiles[:, 2].sum()), 1)
    work = _Work(items, tiles, _tile_rows(M), _ROWS_OF_KEYS, B, M, D, number(step.scale), number(keep))

    def run(_: int, start: int, end: int) -> None:
        _forward(start, end, work, inputs, planes, state.first, state.last, pairs)

    in_threads(run, costs, _SCORES_PER_THREAD)
    if state.out is not None and out is not None and state.out is not out:
        state.out.copy_(out)


def backward(step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients) -> None:
    """This step's share of the gradients."""
    compute = torch.promote_types(q.dtype, torch.float32)
    number = torch.empty(0, dtype=compute).numpy().dtype.type
    (B, H, M, D), tiles, d_learned = q.shape, _tiles(step), gradients.d_learned
    if not gradients.accumulate:
        for x in (gradients.dk, gradients.dv):
            x.zero_()
    if len(tiles) == 0:
        return
    dense = d_learned if step.form == "dense" else None
    given = {"dk": gradients.dk, "dv": gradients.dv} | ({} if dense is None else {"dense": dense})
    sums = {name: side_by_side(x.to(compute)) for name, x in given.items()}
    items, costs = _backward_items(B, H, M, tiles, dense, _heads_share(step))
    # each part of the keys has a dq of its own, or their order would decide the last digits
    num_parts = int(items[:, -1].max()) + 1
    dq_shares = torch.zeros(num_parts * B, H, _up_to(M, PRODUCT_ROWS), _up_to(D, LANES), dtype=compute)
    pairs = _pairs(step, q, compute)
    keep_scale = 1.0 if step.dropout_key is None else 1.0 / (1.0 - step.dropout_p)
    read = (q, k, v, gradients.d_out, gradients.lse, gradients.delta)
    inputs = tuple(plane(x.to(compute), compute) for x in read)
    outputs = _Sums(
        dq=plane(dq_shares, compute),
        dk=plane(sums["dk"], compute),
        dv=plane(sums["dv"], compute),
        dense=plane(sums.get("dense"), compute),
        dense_added=dense is not None and dense.shape[:2] != (B, H),
        learned=d_learned is not None,
    )
    d_tables = np.zeros((CHUNKS * torch.get_num_threads(), len(pairs.bias.learned)), number)
    most_rows = _ROWS_OF_KEYS if _heads_share(step) else M
    work = _Work(items, tiles, _tile_rows(M), most_rows, B, M, D, number(step.scale), number(keep_scale))

    def run(chunk: int, start: int, end: int) -> None:
        _backward(start, end, work, inputs, pairs, outputs, d_tables[chunk])

    in_threads(run, costs, _SCORES_PER_THREAD)
    share, *others = dq_shares.split(B)
    for other in others:
        share += other
    share = share[:, :, :M, :D]
    if gradients.accumulate:
        gradients.dq.add_(share)
    else:
        gradients.dq.copy_(share)
    if d_learned is not None and dense is None:
        d_learned += torch.from_numpy(d_tables.sum(axis=0)).view(H, -1)[:, : d_learned.shape[1]]
    for name, x in given.items():
        if x is not sums[name]:
            x.copy_(sums[name])


def _heads_share(step: Step) -> bool:
    """Whether heads read the same data of a bias."""
    return step.form in ("bucket", "projected")


def _backward_items(
    B: int, H: int, M: int, tiles: np.ndarray, dense: Tensor | None, heads_share: bool
) -> tuple[np.ndarray, np.ndarray]:
    """(b, b_end, h, h_end, tile, tile_end, part of the keys) of every item, and its scores.

    An item is some heads and a part of the keys: two items for each thread where heads share the data of the bias,
    more where they do not. Whoever shares a dense plane is in one item.
    """
    batches = [(0, B)] if dense is not None and len(dense) < B else _parts(B, 1)
    wanted = math.ceil((2 if heads_share else CHUNKS) * torch.get_num_threads() / len(batches))
    groups = min(math.ceil(math.sqrt(wanted)) if heads_share else wanted, H)
    if dense is not None and dense.shape[1] < H:
        groups = 1
    heads = _parts(H, math.ceil(H / groups))
    parts = _parts(len(tiles), math.ceil(len(tiles) / math.ceil(wanted / len(heads))))
    keys = np.array([tiles[start:end, 2].sum() for start, end in parts])
    items = _items(batches, heads, [(*part, i) for i, part in enumerate(parts)])
    return items, (items[:, 1] - items[:, 0]) * (items[:, 3] - items[:, 2]) * keys[items[:, 6]] * M
