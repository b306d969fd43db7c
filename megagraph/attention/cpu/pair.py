"""One list of pairs on a CPU, eight heads side by side: what is read for it, and what is done with it.

Number i of eight heads is vector i, as in ``row``; heads beyond the last are zeros, or numbers of no meaning.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megagraph.attention.cpu.dropout import mix32
from megagraph.attention.cpu.row import gather, scatter
from megagraph.attention.cpu.views import BUCKET, PROJECTED, place_of
from megagraph.jit import jit
from megagraph.simd import (
    LANES,
    folded,
    item,
    load,
    load_wide,
    multiply_add,
    splat,
    store,
    twice,
)

CHUNK = 16  # pairs at a time: their keys and values stay in the first level of the cache
_part = jit(forceinline=True)
_AT_ONCE = 32  # entries of two lists that are compared


class Lists(NamedTuple):
    """The lists of a relation by row and by key, as ``step.Step`` has them."""

    row_starts: np.ndarray
    columns: np.ndarray
    key_starts: np.ndarray
    key_rows: np.ndarray
    key_pairs: np.ndarray


class PairBias(NamedTuple):
    """What makes the bias of a pair; what another form needs is empty."""

    form: int
    width: int  # numbers of ``learned`` for each head: 256 buckets (255 = masked), C channels, or none
    buckets: np.ndarray  # uint8 [P]
    numbers: np.ndarray  # [P, C] channels or [P, H] values, flat
    learned: np.ndarray  # [G, width, 8], flat: table or weight


class Work(NamedTuple):
    """Sizes; G groups of eight heads, S sequences, of which those of one relation share its lists."""

    S: int
    H: int
    M: int
    D: int
    num_keys: int  # visiting
    shared: bool
    scale: float
    keep: float  # 1 / (1 - p)
    threshold: np.uint32  # of dropout
    segments: np.ndarray  # int64 [., 3]: first key, first column, length


@_part
def _dot(a, b, width):
    """sum_d a[d] b[d] of eight heads; a and b are an array and a place in it each."""
    (x, at), (y, there) = a, b
    s0 = s1 = twice(splat(x.dtype.type(0)))
    for d in range(0, LANES * width, 4 * LANES):
        s0 = multiply_add(load_wide(x, at + d), load_wide(y, there + d), s0)
        s1 = multiply_add(load_wide(x, at + d + 16), load_wide(y, there + d + 16), s1)
    return folded(s0 + s1)


@_part
def dots(a, at, rows, b, places, n, width, out):
    """out[i, j] = sum_d a[at + i, d] b[places[j] + d] of eight heads for so many rows i, [rows, CHUNK] of them.

    Four of the other side at a time, of two rows: each number that is read is multiplied twice.
    """
    size, whole = LANES * width, n - n % 4
    for i in range(0, rows - 1, 2):
        for j in range(0, whole, 4):
            _dots_of_two(a, at + i * size, b, places, j, width, out, LANES * (i * CHUNK + j))
    for i in range(rows - rows % 2, rows):
        for j in range(0, whole, 4):
            _dots_of_one(a, at + i * size, b, places, j, width, out, LANES * (i * CHUNK + j))
    for i in range(rows):
        for j in range(whole, n):
            store(out, LANES * (i * CHUNK + j), _dot((a, at + i * size), (b, places[j]), width))


@_part
def _dots_of_one(a, at, b, places, j, width, out, to):
    first, second, third, fourth = places[j], places[j + 1], places[j + 2], places[j + 3]
    s0 = s1 = s2 = s3 = twice(splat(a.dtype.type(0)))
    for d in range(0, LANES * width, 2 * LANES):
        x = load_wide(a, at + d)
        s0 = multiply_add(x, load_wide(b, first + d), s0)
        s1 = multiply_add(x, load_wide(b, second + d), s1)
        s2 = multiply_add(x, load_wide(b, third + d), s2)
        s3 = multiply_add(x, load_wide(b, fourth + d), s3)
    _store_folded(out, to, s0, s1, s2, s3)


@_part
def _dots_of_two(a, at, b, places, j, width, out, to):
    first, second, third, fourth = places[j], places[j + 1], places[j + 2], places[j + 3]
    s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = twice(splat(a.dtype.type(0)))
    for d in range(0, LANES * width, 2 * LANES):
        x, y = load_wide(a, at + d), load_wide(a, at + LANES * width + d)
        z = load_wide(b, first + d)
        s0, t0 = multiply_add(x, z, s0), multiply_add(y, z, t0)
        z = load_wide(b, second + d)
        s1, t1 = multiply_add(x, z, s1), multiply_add(y, z, t1)
        z = load_wide(b, third + d)
        s2, t2 = multiply_add(x, z, s2), multiply_add(y, z, t2)
        z = load_wide(b, fourth + d)
        s3, t3 = multiply_add(x, z, s3), multiply_add(y, z, t3)
    _store_folded(out, to, s0, s1, s2, s3)
    _store_folded(out, to + LANES * CHUNK, t0, t1, t2, t3)


@_part
def _store_folded(out, to, s0, s1, s2, s3):
    store(out, to, folded(s0))
    store(out, to + 8, folded(s1))
    store(out, to + 16, folded(s2))
    store(out, to + 24, folded(s3))


@_part
def add_combined(weights, x, places, n, width, out, rows):
    """out[i, d] += sum_j weights[i, j] x[places[j] + d] for so many rows i, [rows, CHUNK] of ``weights``."""
    for i in range(0, rows - 1, 2):
        _combine_two(weights, LANES * CHUNK * i, x, places, n, width, out, LANES * width * i)
    if rows % 2:
        _combine_one(weights, LANES * CHUNK * (rows - 1), x, places, n, width, out, LANES * width * (rows - 1))


@_part
def _combine_one(weights, of, x, places, n, width, out, to):
    zero, whole = twice(splat(x.dtype.type(0))), n - n % 2
    for d in range(0, LANES * width, 4 * LANES):
        s0 = s1 = s2 = s3 = zero  # of even and of odd ones
        for j in range(0, whole, 2):
            w, at = twice(load(weights, of + LANES * j)), places[j] + d
            s0 = multiply_add(w, load_wide(x, at), s0)
            s1 = multiply_add(w, load_wide(x, at + 16), s1)
            w, at = twice(load(weights, of + LANES * j + 8)), places[j + 1] + d
            s2 = multiply_add(w, load_wide(x, at), s2)
            s3 = multiply_add(w, load_wide(x, at + 16), s3)
        if whole < n:
            w, at = twice(load(weights, of + LANES * whole)), places[whole] + d
            s0 = multiply_add(w, load_wide(x, at), s0)
            s1 = multiply_add(w, load_wide(x, at + 16), s1)
        _add_to(out, to + d, s0 + s2, s1 + s3)


@_part
def _combine_two(weights, of, x, places, n, width, out, to):
    zero, whole, other = twice(splat(x.dtype.type(0))), n - n % 2, of + LANES * CHUNK
    for d in range(0, LANES * width, 4 * LANES):
        s0 = s1 = s2 = s3 = t0 = t1 = t2 = t3 = zero
        for j in range(0, whole, 2):
            w, u = twice(load(weights, of + LANES * j)), twice(load(weights, other + LANES * j))
            y, z = load_wide(x, places[j] + d), load_wide(x, places[j] + d + 16)
            s0, t0 = multiply_add(w, y, s0), multiply_add(u, y, t0)
            s1, t1 = multiply_add(w, z, s1), multiply_add(u, z, t1)
            w, u = twice(load(weights, of + LANES * j + 8)), twice(load(weights, other + LANES * j + 8))
            y, z = load_wide(x, places[j + 1] + d), load_wide(x, places[j + 1] + d + 16)
            s2, t2 = multiply_add(w, y, s2), multiply_add(u, y, t2)
            s3, t3 = multiply_add(w, z, s3), multiply_add(u, z, t3)
        if whole < n:
            w, u = twice(load(weights, of + LANES * whole)), twice(load(weights, other + LANES * whole))
            y, z = load_wide(x, places[whole] + d), load_wide(x, places[whole] + d + 16)
            s0, t0 = multiply_add(w, y, s0), multiply_add(u, y, t0)
            s1, t1 = multiply_add(w, z, s1), multiply_add(u, z, t1)
        _add_to(out, to + d, s0 + s2, s1 + s3)
        _add_to(out, to + LANES * width + d, t0 + t2, t1 + t3)


@_part
def _add_to(out, at, x, y):
    store(out, at, load_wide(out, at) + x)
    store(out, at + 16, load_wide(out, at + 16) + y)


@_part
def bias_of(pair, bias, group, heads, H, lane):
    """Bias of a pair, of eight heads; ``lane`` is scratch."""
    if bias.form == BUCKET:
        return load(bias.learned, LANES * (group * bias.width + np.intp(item(bias.buckets, pair))))
    if bias.form == PROJECTED:
        sum_ = splat(bias.learned.dtype.type(0))
        for c in range(bias.width):
            weight = load(bias.learned, LANES * (group * bias.width + c))
            sum_ = multiply_add(weight, splat(item(bias.numbers, pair * bias.width + c)), sum_)
        return sum_
    for head in range(heads):
        lane[head] = item(bias.numbers, pair * H + LANES * group + head)
    return load(lane, 0)


@_part
def add_to_table(sums, pair, bias, group, ds):
    """A pair's share of the gradient of a table or weight, of eight heads."""
    if bias.form == BUCKET:
        at = LANES * (group * bias.width + np.intp(item(bias.buckets, pair)))
        store(sums, at, load(sums, at) + ds)
    else:
        for c in range(bias.width):
            at = LANES * (group * bias.width + c)
            store(sums, at, multiply_add(ds, splat(item(bias.numbers, pair * bias.width + c)), load(sums, at)))


@_part
def end_of_equals(starts, entries, first, last, most):
    """Where lists end that name the same as the first one, at most so many."""
    n, end = starts[first + 1] - starts[first], first + 1
    while end < last and end - first < most and starts[end + 1] - starts[end] == n:
        i = 0
        while i < n:
            stop, different = min(i + _AT_ONCE, n), False
            for j in range(i, stop):  # no way out of it, so that it takes many at a time
                different |= item(entries, starts[first] + j) != item(entries, starts[end] + j)
            if different:
                break
            i = stop
        if i < n:
            break
        end += 1
    return end


@_part
def first_from(columns, start, end, column):
    """The first pair of a row whose column is not below this."""
    while start < end:
        middle = (start + end) // 2
        if columns[middle] < column:
            start = middle + 1
        else:
            end = middle
    return start


@_part
def row_key_of(keys, group, row):
    """Dropout keys of a row, of eight heads, groups counted through all sequences; zeros where none is dropped."""
    if len(keys) == 0:
        return splat(np.uint32(0))
    return mix32(load(keys, LANES * group) ^ splat(np.uint32(row)))


@_part
def own_numbers(x, b, group, row, heads, lane):
    """Numbers [B, H, R] of a row's heads."""
    gather(x, place_of(x, (b, LANES * group, row)), heads, 1, lane, 0)
    return load(lane, 0)


@_part
def put(x, x_at, heads, D, out, place, added, row):
    """x [width, 8] into rows of several heads of a plane, or added to them; ``row`` is scratch."""
    if not added:
        scatter(x, x_at, heads, D, out, place_of(out, place))
        return
    at = place_of(out, place)
    for head in range(heads):
        for i in range(D):
            row[i] = x[x_at + LANES * i + head]
        for i in range(D):
            out.memory[at + head * out.stride_h + i] += row[i]
