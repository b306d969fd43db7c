"""One row of scores on a CPU, eight heads side by side: what is read for it, what is done with it, and what it adds to.

Number i of eight heads is vector i: a row of n keys has n vectors, and heads beyond the last are zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from megagraph.attention.cpu.dropout import head_keys, pair_hash
from megagraph.attention.cpu.views import BUCKET, DENSE, PROJECTED, place_of
from megagraph.attention.step import Step
from megagraph.jit import jit
from megagraph.simd import (
    LANES,
    exp,
    fetch,
    finite,
    keep_from,
    load,
    maximum,
    multiply_add,
    not_zero,
    splat,
    store,
    transposed,
)

ZERO, _ONE, _MINUS_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_UNROLLED = 4  # sums that run side by side, or each addition would wait for the one before
_LINE = 16  # numbers of a line of the cache
_IN_A_SUM, ROWS_IN_A_SUM = 16, 32  # a sum of short sums loses fewer digits than one long sum


_part = jit(forceinline=True)  # a call would pass eight numbers for each array


class Dropout(NamedTuple):
    keys: np.ndarray  # uint32 [B, G, 8], of sequences and heads, flat, or none
    threshold: np.uint32
    scale: np.float32  # 1 / (1 - p)


@_part
def gather(x, at, heads, width, out, to):
    """Rows of several heads of a plane, ``at`` for the first, [heads, width], into out [width, 8]."""
    memory, stride, done = x.memory, x.stride_h, 0
    if heads == LANES:
        while done + LANES <= width:
            transposed(memory, at + done, stride, out, to + LANES * done, LANES)
            done += LANES
    for i in range(done, width):
        for head in range(heads):
            out[to + LANES * i + head] = memory[at + head * stride + i]


@_part
def gather_rows(x, sequence, rows, first, n, D, out):
    """``n`` of the listed rows of several heads [heads, R, D] into out [n, width, 8]."""
    b, head, heads = sequence
    for j in range(n):
        gather(x, place_of(x, (b, head, rows[first + j])), heads, D, out, LANES * padded(D) * j)


@_part
def scatter(x, x_at, heads, width, out, at):
    """x [width, 8] into rows of several heads of a plane, the way back of :func:`gather`."""
    memory, stride, done = out.memory, out.stride_h, 0
    if heads == LANES:
        while done + LANES <= width:
            transposed(x, x_at + LANES * done, LANES, memory, at + done, stride)
            done += LANES
    for i in range(done, width):
        for head in range(heads):
            memory[at + head * stride + i] = x[x_at + LANES * i + head]


@_part
def _fetch(x, at, heads, width):
    """Rows of several heads into the cache."""
    for head in range(heads):
        for i in range(0, width, _LINE):
            fetch(x.memory, at + head * x.stride_h + i)


@_part
def fetch_row(x, sequence, start, rows, nth, last, D):
    """The nth row of the heads of a sequence into the cache, if it has so many and is before ``last``."""
    b, head, heads = sequence
    if b < last and start[b] + nth < start[b + 1]:
        _fetch(x, place_of(x, (b, head, rows[start[b] + nth])), heads, D)


@_part
def add_dots(a, b, n, D, out):
    """out[j] += sum_d a[d] b[j, d], for n rounded up to a multiple of 4."""
    row = LANES * D
    for j in range(0, n, _UNROLLED):
        o, at = LANES * j, row * j
        s0 = s1 = s2 = s3 = splat(ZERO)
        for d in range(0, row, LANES):
            x = load(a, d)
            s0 = multiply_add(x, load(b, at + d), s0)
            s1 = multiply_add(x, load(b, at + row + d), s1)
            s2 = multiply_add(x, load(b, at + 2 * row + d), s2)
            s3 = multiply_add(x, load(b, at + 3 * row + d), s3)
        # last: one rounding where the bias is large, not one for each term
        store(out, o, load(out, o) + s0)
        store(out, o + 8, load(out, o + 8) + s1)
        store(out, o + 16, load(out, o + 16) + s2)
        store(out, o + 24, load(out, o + 24) + s3)


@_part
def combine(w, b, n, D, factor, out):
    """out[d] = factor sum_j w[j] b[j, d]; D is a multiple of 4."""
    row = LANES * D
    for d in range(0, row, LANES * _UNROLLED):
        s0 = s1 = s2 = s3 = splat(ZERO)
        for j in range(n):
            x, at = load(w, LANES * j), row * j + d
            s0 = multiply_add(x, load(b, at), s0)
            s1 = multiply_add(x, load(b, at + 8), s1)
            s2 = multiply_add(x, load(b, at + 16), s2)
            s3 = multiply_add(x, load(b, at + 24), s3)
        store(out, d, s0 * factor)
        store(out, d + 8, s1 * factor)
        store(out, d + 16, s2 * factor)
        store(out, d + 24, s3 * factor)


@_part
def add_outer(w, a, n, D, out):
    """out[j, d] += w[j] a[d]."""
    row = LANES * D
    for j in range(n):
        x, at = load(w, LANES * j), row * j
        for d in range(0, row, LANES):
            store(out, at + d, multiply_add(x, load(a, d), load(out, at + d)))


@_part
def fill(x, size, value):
    for i in range(0, size, LANES):
        store(x, i, splat(value))


@_part
def rescale(x, at, size, factor):
    """Multiply x[at..at + size] by a vector of eight, one factor a head."""
    for i in range(at, at + size, LANES):
        store(x, i, load(x, i) * factor)


@jit()
def _side_by_side(slots, first, n):
    return n > 0 and slots[first + n - 1] - slots[first] == n - 1


@_part
def set_to_bias(s, bias, sequence, row, slots, first, n):
    """The bias of a row's n keys into s; -inf where masked."""
    (buckets, channels, learned, dense, mask, strides), (b, head, heads) = bias, sequence
    at, learned_at = b * strides.b + row * strides.m, head * strides.num_learned
    if strides.form == BUCKET:
        for j in range(n):
            store(s, LANES * j, load(learned, learned_at + LANES * np.intp(buckets[at + slots[first + j]])))
    elif strides.form == PROJECTED:
        for j in range(n):
            here, sum_ = at + slots[first + j], splat(ZERO)
            for c in range(strides.num_learned):
                channel = splat(channels[here + c * strides.c])
                sum_ = multiply_add(load(learned, learned_at + LANES * c), channel, sum_)
            store(s, LANES * j, sum_)
    elif strides.form == DENSE:
        at = place_of(dense, (b, head, row))
        if _side_by_side(slots, first, n):
            _fetch(dense, at + slots[first] + dense.stride_row, heads, n)
            gather(dense, at + slots[first], heads, n, s, 0)
        else:
            for j in range(n):
                gather(dense, at + slots[first + j], heads, 1, s, LANES * j)
    else:
        fill(s, LANES * n, ZERO)
    if len(mask):
        at = b * strides.mask_b + row * strides.mask_m
        for j in range(n):
            if mask[at + slots[first + j]]:
                store(s, LANES * j, splat(_MINUS_INF))


@_part
def add_bias_gradient(ds, bias, d_table, d_dense, sequence, row, keys):
    """Add a row's share to the table or weight of its group, or write it into the dense plane."""
    (buckets, channels, _, _, _, strides), (b, head, heads), (slots, first, n) = bias, sequence, keys
    at = b * strides.b + row * strides.m
    if strides.form == BUCKET:
        for j in range(n):
            bucket = LANES * np.intp(buckets[at + slots[first + j]])
            store(d_table, bucket, load(d_table, bucket) + load(ds, LANES * j))
    elif strides.form == PROJECTED:
        for c in range(strides.num_learned):
            here, sum_ = at + c * strides.c, splat(ZERO)
            for j in range(n):
                sum_ = multiply_add(load(ds, LANES * j), splat(channels[here + slots[first + j]]), sum_)
            store(d_table, LANES * c, load(d_table, LANES * c) + sum_)
    elif strides.form == DENSE:
        at = place_of(d_dense, (b, head, row))
        if _side_by_side(slots, first, n):
            _fetch(d_dense, at + slots[first] + d_dense.stride_row, heads, n)
            scatter(ds, 0, heads, n, d_dense, at + slots[first])
        else:
            for j in range(n):
                scatter(ds, LANES * j, heads, 1, d_dense, at + slots[first + j])


@_part
def add(x, size, out, out_at):
    for i in range(0, size, LANES):
        store(out, out_at + i, load(out, out_at + i) + load(x, i))


@_part
def exponentials(s, n):
    """s[j] becomes exp(s[j] - max); returns the max, -inf in an empty row, and the sum."""
    m, l = splat(_MINUS_INF), splat(ZERO)
    for j in range(n):
        m = maximum(m, load(s, LANES * j))
    pivot = finite(m)
    for first in range(0, n, _IN_A_SUM):
        part = splat(ZERO)
        for j in range(first, min(first + _IN_A_SUM, n)):
            p = exp(load(s, LANES * j) - pivot)
            part = part + p
            store(s, LANES * j, p)
        l = l + part
    return m, l


def num_groups(heads):
    """Number of groups of eight heads that hold all ``heads``."""
    return -(-heads // LANES)


def head_keys_of(step: Step, heads: int) -> np.ndarray:
    """The keys of ``Dropout``, of all lanes."""
    if step.dropout_key is None:
        return np.empty(0, np.uint32)
    keys = step.dropout_key.contiguous().numpy().view(np.uint32)
    return head_keys(keys, step.first_head, num_groups(heads) * LANES)


def up(size):
    """``size`` rounded up to a multiple of 4."""
    return (size + _UNROLLED - 1) // _UNROLLED * _UNROLLED


padded = jit()(up)


def zeros(dtype: torch.dtype, *sizes: int) -> tuple[np.ndarray, ...]:
    """Arrays of so many vectors, scratch of compiled functions, which count references of arrays that they make
    themselves. What is never written, where D was rounded up, adds nothing."""
    ends = np.cumsum(sizes) * LANES
    return tuple(np.split(torch.zeros(int(ends[-1]), dtype=dtype, device="cpu").numpy(), ends[:-1]))


@_part
def softmax_backward(s, dp, kept, delta, row_key, keys, dropout):
    """s and dp [n], scores and what their weights receive, become p and ds; ``kept`` the weights that out had."""
    (slots, at, n), (dropout_keys, threshold, dropout_scale) = keys, dropout
    # p is made as in the forward pass: exp(s - lse) would carry the rounding of lse
    _, l = exponentials(s, n)
    inverse = splat(_ONE) / not_zero(l)
    for first in range(0, n, _IN_A_SUM):
        part = splat(ZERO)
        for j in range(first, min(first + _IN_A_SUM, n)):
            p, dp_j = load(s, LANES * j) * inverse, load(dp, LANES * j)
            store(s, LANES * j, p)
            if len(dropout_keys):
                hashed = pair_hash(row_key, splat(np.uint32(slots[at + j])))
                p = keep_from(p, hashed, splat(threshold)) * splat(dropout_scale)
                dp_j = keep_from(dp_j, hashed, splat(threshold)) * splat(dropout_scale)
                store(dp, LANES * j, dp_j)
            store(kept, LANES * j, p)
            part = multiply_add(load(s, LANES * j), dp_j, part)
        delta = delta + part
    for j in range(n):
        store(dp, LANES * j, load(s, LANES * j) * (load(dp, LANES * j) - delta))
