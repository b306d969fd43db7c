"""One tile of scores on a CPU: what is read for it, what is done with it, and what it adds to.

A tile has some queries and keys of one head, ``MOST_KEYS`` numbers from row to row, whatever is in use. Rows beside
it are ``panels``: [panel, rows, 16].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megagraph.attention.cpu.dropout import pair_hash
from megagraph.attention.cpu.product import PRODUCT_ROWS, product_8, product_16
from megagraph.attention.cpu.views import BUCKET, DENSE, PROJECTED, BiasArrays, Plane, place_of
from megagraph.jit import jit
from megagraph.simd import (
    LANES,
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
    splat,
    store,
    sum_of,
    transposed,
)

MOST_ROWS, MOST_KEYS = 96, 240  # of a tile; compiled in
WIDE = 2 * LANES
LONGEST_SUM = 128  # terms one after another; more are several sums, as PyTorch has them, and round less


class Pairs(NamedTuple):
    """What is known of pairs of a row and a column beside their scores."""

    bias: BiasArrays
    padding: np.ndarray  # bool [B, N], True = masked, or none
    row_keys: Plane  # uint32 [B, H, M], or none
    threshold: np.uint32  # a hash below it drops a pair
    first_column: int  # global column of column 0


class Sums(NamedTuple):
    """Gradients that tiles add to."""

    dq: Plane  # [part * B + b, H, M', D']: rows and D rounded up, a plane for each part of the keys
    dk: Plane
    dv: Plane
    dense: Plane  # of a dense bias, which is written unless ``dense_added``
    dense_added: bool
    learned: bool  # whether the gradient of the bias is wanted


def up_to(size, multiple):
    return (size + multiple - 1) // multiple * multiple


up = jit()(up_to)


@jit()
def copy_row(x, start, D, factor, out, to):
    """factor * x[start..start + D] into out[to..]."""
    whole = D // LANES * LANES
    for d in range(0, whole, LANES):
        store(out, to + d, load(x, start + d) * splat(factor))
    for d in range(whole, D):
        out[to + d] = x[start + d] * factor


@jit()
def copy_rows(x, at, n, D, out, to, width):
    """x [n, D] from the row ``at`` of a plane on into out [n, width]."""
    memory, start = x.memory, place_of(x, at)
    one = memory.dtype.type(1)
    for i in range(n):
        copy_row(memory, start + i * x.stride_row, D, one, out, to + i * width)


@jit()
def copy_panels(x, at, n, D, factor, out, rows):
    """factor * x [n, D] into panels of 16 columns, out [panel, rows, 16]: a product reads one panel many times, and
    rows as far apart as those of x would share a few places of the cache."""
    memory, start, stride = x.memory, place_of(x, at), x.stride_row
    whole, panel = D // LANES * LANES, rows * WIDE
    for i in range(n):
        row, to = start + i * stride, i * WIDE
        for d in range(0, whole, LANES):
            store(out, d // WIDE * panel + to + d % WIDE, load(memory, row + d) * splat(factor))
        for d in range(whole, D):
            out[d // WIDE * panel + to + d % WIDE] = memory[row + d] * factor


@jit()
def add_rows(x, n, D, width, out, at):
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
def copy_columns(x, at, n, D, factor, out, width, padded):
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
def scores(rows, keys, D, m, n, out, wanted, place):
    """out [m, n] = rows^T keys of rows [D, m] and keys [D, n], both of a tile's width.

    Meanwhile the tile at (b, h, row, column) of the plane wanted next, unless that is empty, comes into the cache.
    """
    ahead, stride, at = wanted.memory, wanted.stride_row, place_of(wanted, place) + place[3]
    some_ahead = len(ahead) > 0
    wide = n // WIDE * WIDE
    for j in range(0, n, WIDE):
        for i in range(0, m, PRODUCT_ROWS):
            if some_ahead:
                for row in range(i, i + PRODUCT_ROWS):
                    fetch(ahead, at + row * stride + j)
            to = i * MOST_KEYS + j
            for d in range(0, D, LONGEST_SUM):
                length, row, key = min(LONGEST_SUM, D - d), d * MOST_ROWS + i, d * MOST_KEYS + j
                if j < wide:
                    product_16(rows, row, 1, MOST_ROWS, length, keys, key, MOST_KEYS, out, to, MOST_KEYS, d > 0)
                else:
                    product_8(rows, row, 1, MOST_ROWS, length, keys, key, MOST_KEYS, out, to, MOST_KEYS, d > 0)


@jit()
def add_to_rows(s, x, m, n, width, out, at):
    """out [m, width] += s x of s [m, n] and x [n, width], in panels."""
    wide = width // WIDE * WIDE
    for i in range(0, m, PRODUCT_ROWS):
        row, to = i * MOST_KEYS, at + i * width
        for d in range(0, wide, WIDE):
            product_16(s, row, MOST_KEYS, 1, n, x, d * MOST_KEYS, WIDE, out, to + d, width, True)
        if wide < width:
            product_8(s, row, MOST_KEYS, 1, n, x, wide * MOST_KEYS, WIDE, out, to + wide, width, True)


@jit()
def add_to_keys(s, x, m, n, width, out):
    """out [n, width] += s^T x of s [m, n] and x [m, width], in panels."""
    wide = width // WIDE * WIDE
    for d in range(0, wide, WIDE):
        for j in range(0, n, PRODUCT_ROWS):
            product_16(s, j, 1, MOST_KEYS, m, x, d * MOST_ROWS, WIDE, out, j * width + d, width, True)
    if wide < width:
        for j in range(0, n, PRODUCT_ROWS):
            product_8(s, j, 1, MOST_KEYS, m, x, wide * MOST_ROWS, WIDE, out, j * width + wide, width, True)


@jit()
def add_bias(s, m, n, padded, pairs, place):
    """Add the bias to the scores of m rows and n keys; -inf where masked, and on to ``padded``."""
    b, h, row, column = place
    # arrays are taken out of their tuples once for a tile: each time counts a reference
    (buckets, channels, learned, dense, mask, strides), padding = pairs.bias, pairs.padding
    dense, dense_at, dense_stride = dense.memory, place_of(dense, place) + column, dense.stride_row
    whole = n // LANES * LANES
    for i in range(m):
        o, at = i * MOST_KEYS, b * strides.b + (row + i) * strides.m + column
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
def add_bias_gradient(ds, m, n, bias, d_lanes, sums, place):
    """Add the share of a tile to d_lanes [R, 8], the sum of whose lanes is wanted; write or add it to a dense plane."""
    b, _, row, column = place
    buckets, channels, _, _, _, strides = bias
    d_dense, d_dense_at, d_dense_stride = sums.dense.memory, place_of(sums.dense, place) + column, sums.dense.stride_row
    added = sums.dense_added
    whole, odd = n // LANES * LANES, n // WIDE * WIDE
    for i in range(m):
        o, at = i * MOST_KEYS, b * strides.b + (row + i) * strides.m + column
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
                for j in range(0, odd, WIDE):
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
def add_lanes(d_lanes, size, out, at):
    """out [size] += the sums of d_lanes [size, 8], which become 0."""
    zero = d_lanes.dtype.type(0)
    for r in range(size):
        sum_ = zero
        for lane in range(LANES):
            sum_ += d_lanes[LANES * r + lane]
            d_lanes[LANES * r + lane] = zero
        out[at + r] += sum_


@jit()
def fold_rows(s, m, padded, running, at, width, pairs, place):
    """Scores s [m, padded] become exponentials; the running maxima, sums and total of their rows, from ``at`` on,
    follow, all but the product."""
    maxima, sums, acc = running
    row_keys, key_at, threshold = pairs.row_keys.memory, place_of(pairs.row_keys, place), pairs.threshold
    column = place[3] + pairs.first_column
    for i in range(m):
        o, here = i * MOST_KEYS, at + i
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
def softmax_backward(s, dp, m, padded, lse, delta, pairs, place):
    """dp becomes ds = p * (keep * dp - delta), then s keep * p, of p = exp(s - lse); both [m, padded]."""
    lse, lse_at, lse_stride = lse.memory, place_of(lse, place), lse.stride_row
    delta, delta_at, delta_stride = delta.memory, place_of(delta, place), delta.stride_row
    row_keys, key_at, threshold = pairs.row_keys.memory, place_of(pairs.row_keys, place), pairs.threshold
    column = place[3] + pairs.first_column
    hashed = splat(np.uint32(0))
    for i in range(m):
        pivot, shift = lse[lse_at + i * lse_stride], splat(delta[delta_at + i * delta_stride])
        pivot = splat(pivot if pivot > -np.inf else s.dtype.type(0))
        for j in range(0, padded, LANES):
            o = i * MOST_KEYS + j
            p, g = exp(load(s, o) - pivot), load(dp, o)
            if len(row_keys):
                hashed = pair_hash(splat(row_keys[key_at + i]), counting(np.uint32(column + j)))
                g = keep_from(g, hashed, splat(threshold))
                store(s, o, keep_from(p, hashed, splat(threshold)))
            else:
                store(s, o, p)
            store(dp, o, p * (g - shift))
