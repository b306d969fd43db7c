"""Short sequences on a CPU: one row of scores at a time, eight heads side by side, with nothing written in between.

Where sequences are short and heads narrow, torch operations on tiles spend their time on passes over the scores and on
products too small to be fast. Here a group of eight heads of one sequence is copied so that a vector holds the same
number of all eight (``lanes``). Then nothing crosses lanes: the bias is one load (a row of the table), or C
multiply-adds; a softmax runs down the row; and the gradient of a table has no two lanes that add to one entry.

The numbers are those of the other implementations: the same dropout, bit for bit, and lse. float32 only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.cpu.dropout import mix32, pair_hash
from megagraph.attention.cpu.simd import (
    LANES,
    borrowed,
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
from megagraph.attention.cpu.views import BUCKET, DENSE, PROJECTED, BiasArrays, bias_arrays, plane
from megagraph.attention.dropout import dropout_threshold
from megagraph.attention.packing import Rows
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.threads import CHUNKS, in_threads

_ZERO, _ONE, _MINUS_INF = np.float32(0.0), np.float32(1.0), np.float32(-np.inf)
_UNROLLED = 4  # sums that run side by side, or each addition would wait for the one before
_SCORES_PER_THREAD = 1 << 15
_LINE = 16  # numbers of a line of the cache
_IN_A_SUM, _ROWS_IN_A_SUM = 16, 32  # a sum of short sums loses fewer digits than one long sum


_part = jit(forceinline=True)  # a call would pass eight numbers for each array


class _Dropout(NamedTuple):
    keys: np.ndarray  # uint32 [B], or none
    threshold: np.uint32
    scale: np.float32  # 1 / (1 - p)


@_part
def _gather(x, at, stride_h, heads, width, out, out_at):
    """Rows of several heads, x [heads, width], into out [width, 8]."""
    done = 0
    if heads == LANES:
        while done + LANES <= width:
            transposed(x, at + done, stride_h, out, out_at + LANES * done, LANES)
            done += LANES
    for i in range(done, width):
        for head in range(heads):
            out[out_at + LANES * i + head] = x[at + head * stride_h + i]


@_part
def _gather_rows(x, at, stride_h, stride_row, rows, first, n, heads, D, out, width):
    """``n`` of the listed rows of several heads, x [heads, R, D], into out [n, width, 8]."""
    for j in range(n):
        _gather(x, at + rows[first + j] * stride_row, stride_h, heads, D, out, LANES * width * j)


@_part
def _scatter(x, x_at, heads, width, out, at, stride_h):
    """Back: x [width, 8] into rows of several heads, out [heads, width]."""
    done = 0
    if heads == LANES:
        while done + LANES <= width:
            transposed(x, x_at + LANES * done, LANES, out, at + done, stride_h)
            done += LANES
    for i in range(done, width):
        for head in range(heads):
            out[at + head * stride_h + i] = x[x_at + LANES * i + head]


@_part
def _fetch(x, at, stride_h, heads, width):
    """Rows of several heads, x [heads, width], into the cache."""
    for head in range(heads):
        for i in range(0, width, _LINE):
            fetch(x, at + head * stride_h + i)


@_part
def _fetch_row(x, x_b, x_h, x_r, start, at, b, head, last, nth, heads, D):
    """A row of the heads of a sequence into the cache, if it has so many and is before ``last``."""
    if b < last and start[b] + nth < start[b + 1]:
        _fetch(x, b * x_b + head * x_h + at[start[b] + nth] * x_r, x_h, heads, D)


@_part
def _add_dots(a, b, n, D, out):
    """out[j] += sum_d a[d] b[j, d], for n rounded up to a multiple of 4."""
    row = LANES * D
    for j in range(0, n, _UNROLLED):
        o, at = LANES * j, row * j
        s0 = s1 = s2 = s3 = splat(_ZERO)
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
def _combine(w, b, n, D, factor, out):
    """out[d] = factor sum_j w[j] b[j, d]; D is a multiple of 4."""
    row = LANES * D
    for d in range(0, row, LANES * _UNROLLED):
        s0 = s1 = s2 = s3 = splat(_ZERO)
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
def _add_outer(w, a, n, D, out):
    """out[j, d] += w[j] a[d]."""
    row = LANES * D
    for j in range(n):
        x, at = load(w, LANES * j), row * j
        for d in range(0, row, LANES):
            store(out, at + d, multiply_add(x, load(a, d), load(out, at + d)))


@_part
def _fill(x, size, value):
    for i in range(0, size, LANES):
        store(x, i, splat(value))


@_part
def _scale(x, size, factor):
    for i in range(0, size, LANES):
        store(x, i, load(x, i) * splat(factor))


@jit()
def _side_by_side(slots, first, n):
    return n > 0 and slots[first + n - 1] - slots[first] == n - 1


@_part
def _set_to_bias(s, steps, buckets, channels, learned, dense, mask, b, row, group, heads, slots, first, n):
    """The bias of a row's n keys into s; -inf where masked."""
    at, learned_at = b * steps.b + row * steps.m, group * LANES * steps.num_learned
    if steps.form == BUCKET:
        for j in range(n):
            store(s, LANES * j, load(learned, learned_at + LANES * np.intp(buckets[at + slots[first + j]])))
    elif steps.form == PROJECTED:
        for j in range(n):
            here, sum_ = at + slots[first + j], splat(_ZERO)
            for c in range(steps.num_learned):
                channel = splat(channels[here + c * steps.c])
                sum_ = multiply_add(load(learned, learned_at + LANES * c), channel, sum_)
            store(s, LANES * j, sum_)
    elif steps.form == DENSE:
        dense, stride_b, stride_h, stride_row = dense
        at = b * stride_b + LANES * group * stride_h + row * stride_row
        if _side_by_side(slots, first, n):
            _fetch(dense, at + slots[first] + stride_row, stride_h, heads, n)
            _gather(dense, at + slots[first], stride_h, heads, n, s, 0)
        else:
            for j in range(n):
                _gather(dense, at + slots[first + j], stride_h, heads, 1, s, LANES * j)
    else:
        _fill(s, LANES * n, _ZERO)
    if len(mask):
        at = b * steps.mask_b + row * steps.mask_m
        for j in range(n):
            if mask[at + slots[first + j]]:
                store(s, LANES * j, splat(_MINUS_INF))


@_part
def _add_bias_gradient(ds, steps, buckets, channels, d_table, d_dense, b, row, group, heads, slots, first, n):
    """Add a row's share to the table or weight of its group, or write it into the dense plane."""
    at = b * steps.b + row * steps.m
    if steps.form == BUCKET:
        for j in range(n):
            bucket = LANES * np.intp(buckets[at + slots[first + j]])
            store(d_table, bucket, load(d_table, bucket) + load(ds, LANES * j))
    elif steps.form == PROJECTED:
        for c in range(steps.num_learned):
            here, sum_ = at + c * steps.c, splat(_ZERO)
            for j in range(n):
                sum_ = multiply_add(load(ds, LANES * j), splat(channels[here + slots[first + j]]), sum_)
            store(d_table, LANES * c, load(d_table, LANES * c) + sum_)
    elif steps.form == DENSE:
        d_dense, stride_b, stride_h, stride_row = d_dense
        at = b * stride_b + LANES * group * stride_h + row * stride_row
        if _side_by_side(slots, first, n):
            _fetch(d_dense, at + slots[first] + stride_row, stride_h, heads, n)
            _scatter(ds, 0, heads, n, d_dense, at + slots[first], stride_h)
        else:
            for j in range(n):
                _scatter(ds, LANES * j, heads, 1, d_dense, at + slots[first + j], stride_h)


@_part
def _add(x, size, out, out_at):
    for i in range(0, size, LANES):
        store(out, out_at + i, load(out, out_at + i) + load(x, i))


@_part
def _exponentials(s, n):
    """s[j] becomes exp(s[j] - max); returns the max, -inf in an empty row, and the sum."""
    m, l = splat(_MINUS_INF), splat(_ZERO)
    for j in range(n):
        m = maximum(m, load(s, LANES * j))
    pivot = finite(m)
    for first in range(0, n, _IN_A_SUM):
        part = splat(_ZERO)
        for j in range(first, min(first + _IN_A_SUM, n)):
            p = exp(load(s, LANES * j) - pivot)
            part = part + p
            store(s, LANES * j, p)
        l = l + part
    return m, l


def _up(size):
    """To a multiple of 4."""
    return (size + _UNROLLED - 1) // _UNROLLED * _UNROLLED


_padded = jit()(_up)


@_part
def _head_keys(key, group):
    """A sequence's key with each head of the group folded in."""
    head = np.arange(LANES * group, LANES * (group + 1)).astype(np.uint32)
    return mix32(splat(key) ^ load(head, 0))


@jit(nogil=True)
def _forward(first, last, H, D, scale, planes, queries, keys, bias, dropout, scratch):
    """Sequences first..last; maxima and sums [B, H, M], of a row's scores and their exponentials, unless empty."""
    q, k, v, out, maxima, sums = borrowed(planes)
    q, q_b, q_h, q_r = q
    k, k_b, k_h, k_r = k
    v, v_b, v_h, v_r = v
    out, out_b, out_h, out_r = out
    maxima, maxima_b, maxima_h, maxima_r = maxima
    sums = sums.memory
    (query_start, query_slot, query_at), (key_start, slots, key_at) = borrowed((queries, keys))
    buckets, channels, learned, dense, mask, steps = borrowed(bias)
    dropout_keys, threshold, dropout_scale = borrowed(dropout)
    width = _padded(D)
    k_t, v_t, q_t, out_t, s, state = borrowed(scratch)
    head_key = row_key = splat(np.uint32(0))
    dropped = len(dropout_keys) > 0
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(-(-H // LANES)):
            head = LANES * group
            heads = min(LANES, H - head)
            next_b, next_head = (b, head + LANES) if head + LANES < H else (b + 1, 0)
            _gather_rows(k, b * k_b + head * k_h, k_h, k_r, key_at, at, n, heads, D, k_t, width)
            _gather_rows(v, b * v_b + head * v_h, v_h, v_r, key_at, at, n, heads, D, v_t, width)
            if dropped:
                head_key = _head_keys(dropout_keys[b], group)
            for i in range(query_start[b], query_start[b + 1]):
                row, slot = query_at[i], query_slot[i]
                nth = i - query_start[b]
                _fetch_row(k, k_b, k_h, k_r, key_start, key_at, next_b, next_head, last, nth, heads, D)
                _fetch_row(v, v_b, v_h, v_r, key_start, key_at, next_b, next_head, last, nth, heads, D)
                _fetch_row(q, q_b, q_h, q_r, query_start, query_at, next_b, next_head, last, nth, heads, D)
                _gather(q, b * q_b + head * q_h + row * q_r, q_h, heads, D, q_t, 0)
                _scale(q_t, LANES * width, scale)
                _set_to_bias(s, steps, buckets, channels, learned, dense, mask, b, slot, group, heads, slots, at, n)
                _add_dots(q_t, k_t, n, width, s)

                m, l = _exponentials(s, n)
                if dropped:
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                    for j in range(n):
                        hashed = pair_hash(row_key, splat(np.uint32(slots[at + j])))
                        store(s, LANES * j, keep_from(load(s, LANES * j), hashed, splat(threshold)))
                _combine(s, v_t, n, width, splat(dropout_scale) / not_zero(l), out_t)
                _scatter(out_t, 0, heads, D, out, b * out_b + head * out_h + row * out_r, out_h)
                if len(maxima):
                    store(state, 0, m)
                    store(state, LANES, l)
                    place = b * maxima_b + head * maxima_h + row * maxima_r
                    _scatter(state, 0, heads, 1, maxima, place, maxima_h)
                    _scatter(state, LANES, heads, 1, sums, place, maxima_h)


@jit(nogil=True)
def _backward(first, last, H, D, scale, planes, learned_grad, d_learned, queries, keys, bias, dropout, scratch):
    """Sequences first..last; gradients are written, those of a table or weight added to ``d_learned``."""
    q, k, v, d_out, deltas, dq, dk, dv, d_dense = borrowed(planes)
    q, q_b, q_h, q_r = q
    k, k_b, k_h, k_r = k
    v, v_b, v_h, v_r = v
    d_out, d_out_b, d_out_h, d_out_r = d_out
    deltas, deltas_b, deltas_h, deltas_r = deltas
    dq, dq_b, dq_h, dq_r = dq
    dk, dk_b, dk_h, dk_r = dk
    dv, dv_b, dv_h, dv_r = dv
    (query_start, query_slot, query_at), (key_start, slots, key_at) = borrowed((queries, keys))
    buckets, channels, learned, dense, mask, steps = borrowed(bias)
    dropout_keys, threshold, dropout_scale = borrowed(dropout)
    d_learned = borrowed(d_learned)
    width, of_group = _padded(D), LANES * steps.num_learned
    k_t, v_t, dk_t, dv_t, q_t, d_out_t, dq_t, s, dp, kept, d_table, state = borrowed(scratch)
    head_key = row_key = splat(np.uint32(0))
    dropped = len(dropout_keys) > 0
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(-(-H // LANES)):
            head = LANES * group
            heads = min(LANES, H - head)
            next_b, next_head = (b, head + LANES) if head + LANES < H else (b + 1, 0)
            _gather_rows(k, b * k_b + head * k_h, k_h, k_r, key_at, at, n, heads, D, k_t, width)
            _gather_rows(v, b * v_b + head * v_h, v_h, v_r, key_at, at, n, heads, D, v_t, width)
            _fill(dk_t, LANES * width * n, _ZERO)
            _fill(dv_t, LANES * width * n, _ZERO)
            if dropped:
                head_key = _head_keys(dropout_keys[b], group)
            for i in range(query_start[b], query_start[b + 1]):
                row, slot = query_at[i], query_slot[i]
                nth = i - query_start[b]
                _fetch_row(k, k_b, k_h, k_r, key_start, key_at, next_b, next_head, last, nth, heads, D)
                _fetch_row(v, v_b, v_h, v_r, key_start, key_at, next_b, next_head, last, nth, heads, D)
                _fetch_row(q, q_b, q_h, q_r, query_start, query_at, next_b, next_head, last, nth, heads, D)
                _fetch_row(
                    d_out, d_out_b, d_out_h, d_out_r, query_start, query_at, next_b, next_head, last, nth, heads, D
                )
                _gather(q, b * q_b + head * q_h + row * q_r, q_h, heads, D, q_t, 0)
                _scale(q_t, LANES * width, scale)
                _gather(d_out, b * d_out_b + head * d_out_h + row * d_out_r, d_out_h, heads, D, d_out_t, 0)
                _set_to_bias(s, steps, buckets, channels, learned, dense, mask, b, slot, group, heads, slots, at, n)
                _add_dots(q_t, k_t, n, width, s)
                _fill(dp, LANES * _padded(n), _ZERO)
                _add_dots(d_out_t, v_t, n, width, dp)

                # p is made as in the forward pass: exp(s - lse) would carry the rounding of lse
                _, l = _exponentials(s, n)
                inverse, delta = splat(_ONE) / not_zero(l), splat(_ZERO)
                if len(deltas):
                    _gather(deltas, b * deltas_b + head * deltas_h + row * deltas_r, deltas_h, heads, 1, state, 0)
                    delta = load(state, 0)
                if dropped:
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                for first_key in range(0, n, _IN_A_SUM):
                    part = splat(_ZERO)
                    for j in range(first_key, min(first_key + _IN_A_SUM, n)):
                        p, dp_j = load(s, LANES * j) * inverse, load(dp, LANES * j)
                        store(s, LANES * j, p)
                        if dropped:
                            hashed = pair_hash(row_key, splat(np.uint32(slots[at + j])))
                            p = keep_from(p, hashed, splat(threshold)) * splat(dropout_scale)
                            dp_j = keep_from(dp_j, hashed, splat(threshold)) * splat(dropout_scale)
                            store(dp, LANES * j, dp_j)
                        store(kept, LANES * j, p)
                        part = multiply_add(load(s, LANES * j), dp_j, part)
                    delta = delta + part
                for j in range(n):
                    store(dp, LANES * j, load(s, LANES * j) * (load(dp, LANES * j) - delta))

                _add_outer(kept, d_out_t, n, width, dv_t)
                _add_outer(dp, q_t, n, width, dk_t)
                _combine(dp, k_t, n, width, splat(scale), dq_t)
                _scatter(dq_t, 0, heads, D, dq, b * dq_b + head * dq_h + row * dq_r, dq_h)
                if learned_grad:
                    _add_bias_gradient(
                        dp, steps, buckets, channels, d_table, d_dense, b, slot, group, heads, slots, at, n
                    )
                    if (i + 1 - query_start[b]) % _ROWS_IN_A_SUM == 0 or i + 1 == query_start[b + 1]:
                        _add(d_table, of_group, d_learned, group * of_group)
                        _fill(d_table, of_group, _ZERO)
            for j in range(n):
                row = key_at[at + j]
                _scatter(dk_t, LANES * width * j, heads, D, dk, b * dk_b + head * dk_h + row * dk_r, dk_h)
                _scatter(dv_t, LANES * width * j, heads, D, dv, b * dv_b + head * dv_h + row * dv_r, dv_h)


def _side_by_side_as(x: Tensor) -> Tensor:
    """x, or a tensor like it whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else torch.zeros_like(x, memory_format=torch.contiguous_format)


def _num_groups(heads: int) -> int:
    return -(-heads // LANES)


def _bias(step: Step, heads: int) -> BiasArrays:
    """With ``learned`` [G, R, 8], flat."""
    bias = bias_arrays(step, torch.float32)
    lanes = np.zeros((_num_groups(heads) * LANES, bias.at.num_learned), np.float32)
    lanes[:heads] = bias.learned.reshape(heads, -1)
    by_lanes = lanes.reshape(_num_groups(heads), LANES, -1).transpose(0, 2, 1)
    return bias._replace(learned=np.ascontiguousarray(by_lanes).reshape(-1))


def _dropout(step: Step) -> _Dropout:
    if step.dropout_key is None:
        return _Dropout(np.empty(0, np.uint32), np.uint32(0), np.float32(1.0))
    keys = step.dropout_key.contiguous().numpy().view(np.uint32)
    return _Dropout(keys, np.uint32(dropout_threshold(step.dropout_p)), np.float32(1.0 / (1.0 - step.dropout_p)))


def _scratch(*sizes: int) -> tuple[np.ndarray, ...]:
    """Arrays of so many vectors. They start as zeros: what is never written, where D was rounded up, adds nothing."""
    ends = np.cumsum(sizes) * LANES
    return tuple(np.split(torch.zeros(int(ends[-1]), dtype=torch.float32).numpy(), ends[:-1]))


def _longest(rows: Rows, first: int, last: int) -> int:
    start = rows.start[first : last + 1]
    return int((start[1:] - start[:-1]).max(initial=0))


def _costs(heads: int, queries: Rows, keys: Rows) -> np.ndarray:
    """Scores of every sequence."""
    return (queries.start[1:] - queries.start[:-1]) * (keys.start[1:] - keys.start[:-1]) * heads


def whole_rows(step: Step, q: Tensor, k: Tensor) -> tuple[Rows, Rows]:
    """All rows of q [B, H, M, D], and the keys of k [B, H, N, D] that are no padding."""
    padding = step.key_padding_mask
    keys = Rows.whole(len(k), k.shape[2]) if padding is None else Rows.unpadded(padding)
    return Rows.whole(len(q), q.shape[2]), keys


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State, rows: tuple[Rows, Rows] | None = None) -> None:
    """Write out, and lse if wanted, of whole sequences.

    q [B, H, M, D], k, v [B, H, N, D] and the result are float32. ``rows``: the queries and the keys among them, all
    but padding unless given; packed ones stand in one plane, [1, H, R, D].
    """
    queries, keys = rows or whole_rows(step, q, k)
    H, D, given, lse = q.shape[1], q.shape[3], state.out, state.lse
    assert given is not None
    sums = None if lse is None else torch.empty_like(lse)
    out = _side_by_side_as(given)
    planes = tuple(plane(x, q.dtype) for x in (q, k, v, out, lse, sums))
    bias, dropout, scale = _bias(step, H), _dropout(step), np.float32(step.scale)

    def run(_: int, first: int, last: int) -> None:
        size, width = _up(_longest(keys, first, last)), _up(D)
        scratch = _scratch(size * width, size * width, width, width, size, 2)
        _forward(first, last, H, D, scale, planes, queries, keys, bias, dropout, scratch)

    in_threads(run, _costs(H, queries, keys), _SCORES_PER_THREAD)
    if lse is not None and sums is not None:
        lse.add_(sums.log_())
    if out is not given:
        given.copy_(out)


def backward(
    step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients, rows: tuple[Rows, Rows] | None = None
) -> None:
    """Write the gradients of these rows, and add those of a table or a weight; for ``rows`` see :func:`forward`."""
    queries, keys = rows or whole_rows(step, q, k)
    H, D, d_learned = q.shape[1], q.shape[3], gradients.d_learned
    dense = d_learned if step.form == "dense" else None
    given = [gradients.dq, gradients.dk, gradients.dv, dense]
    if rows is None and step.key_padding_mask is not None:  # what has no key is not visited
        for x in given:
            if x is not None:
                x.zero_()
    written = [None if x is None else _side_by_side_as(x) for x in given]
    planes = tuple(plane(x, q.dtype) for x in (q, k, v, gradients.d_out, gradients.delta, *written))
    bias, dropout, scale = _bias(step, H), _dropout(step), np.float32(step.scale)
    shares = np.zeros((CHUNKS * torch.get_num_threads(), len(bias.learned)), np.float32)

    def run(chunk: int, first: int, last: int) -> None:
        size, width = _up(_longest(keys, first, last)), _up(D)
        sizes = (size * width,) * 4 + (width,) * 3 + (size,) * 3 + (bias.at.num_learned, 1)
        wanted = d_learned is not None, shares[chunk]
        _backward(first, last, H, D, scale, planes, *wanted, queries, keys, bias, dropout, _scratch(*sizes))

    in_threads(run, _costs(H, queries, keys), _SCORES_PER_THREAD)
    if d_learned is not None and dense is None:
        total = torch.from_numpy(shares.sum(axis=0)).view(_num_groups(H), -1, LANES)
        d_learned += total.transpose(1, 2).flatten(0, 1)[:H, : d_learned.shape[1]]
    for x, y in zip(given, written, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
