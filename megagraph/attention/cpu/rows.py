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
from megagraph.attention.cpu.views import BUCKET, DENSE, PROJECTED, BiasArrays, bias_arrays, place_of, plane
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
def _gather(x, at, heads, width, out, to):
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
def _gather_rows(x, sequence, rows, first, n, D, out):
    """``n`` of the listed rows of several heads [heads, R, D] into out [n, width, 8]."""
    b, head, heads = sequence
    for j in range(n):
        _gather(x, place_of(x, (b, head, rows[first + j])), heads, D, out, LANES * _padded(D) * j)


@_part
def _scatter(x, x_at, heads, width, out, at):
    """Back: x [width, 8] into rows of several heads of a plane."""
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
def _fetch_row(x, sequence, start, rows, nth, last, D):
    """The nth row of the heads of a sequence into the cache, if it has so many and is before ``last``."""
    b, head, heads = sequence
    if b < last and start[b] + nth < start[b + 1]:
        _fetch(x, place_of(x, (b, head, rows[start[b] + nth])), heads, D)


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
def _set_to_bias(s, bias, sequence, row, slots, first, n):
    """The bias of a row's n keys into s; -inf where masked."""
    (buckets, channels, learned, dense, mask, strides), (b, head, heads) = bias, sequence
    at, learned_at = b * strides.b + row * strides.m, head * strides.num_learned
    if strides.form == BUCKET:
        for j in range(n):
            store(s, LANES * j, load(learned, learned_at + LANES * np.intp(buckets[at + slots[first + j]])))
    elif strides.form == PROJECTED:
        for j in range(n):
            here, sum_ = at + slots[first + j], splat(_ZERO)
            for c in range(strides.num_learned):
                channel = splat(channels[here + c * strides.c])
                sum_ = multiply_add(load(learned, learned_at + LANES * c), channel, sum_)
            store(s, LANES * j, sum_)
    elif strides.form == DENSE:
        at = place_of(dense, (b, head, row))
        if _side_by_side(slots, first, n):
            _fetch(dense, at + slots[first] + dense.stride_row, heads, n)
            _gather(dense, at + slots[first], heads, n, s, 0)
        else:
            for j in range(n):
                _gather(dense, at + slots[first + j], heads, 1, s, LANES * j)
    else:
        _fill(s, LANES * n, _ZERO)
    if len(mask):
        at = b * strides.mask_b + row * strides.mask_m
        for j in range(n):
            if mask[at + slots[first + j]]:
                store(s, LANES * j, splat(_MINUS_INF))


@_part
def _add_bias_gradient(ds, bias, d_table, d_dense, sequence, row, keys):
    """Add a row's share to the table or weight of its group, or write it into the dense plane."""
    (buckets, channels, _, _, _, strides), (b, head, heads), (slots, first, n) = bias, sequence, keys
    at = b * strides.b + row * strides.m
    if strides.form == BUCKET:
        for j in range(n):
            bucket = LANES * np.intp(buckets[at + slots[first + j]])
            store(d_table, bucket, load(d_table, bucket) + load(ds, LANES * j))
    elif strides.form == PROJECTED:
        for c in range(strides.num_learned):
            here, sum_ = at + c * strides.c, splat(_ZERO)
            for j in range(n):
                sum_ = multiply_add(load(ds, LANES * j), splat(channels[here + slots[first + j]]), sum_)
            store(d_table, LANES * c, load(d_table, LANES * c) + sum_)
    elif strides.form == DENSE:
        at = place_of(d_dense, (b, head, row))
        if _side_by_side(slots, first, n):
            _fetch(d_dense, at + slots[first] + d_dense.stride_row, heads, n)
            _scatter(ds, 0, heads, n, d_dense, at + slots[first])
        else:
            for j in range(n):
                _scatter(ds, LANES * j, heads, 1, d_dense, at + slots[first + j])


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
def _forward(first, last, sizes, planes, rows, bias, dropout, scratch):
    """Sequences first..last; maxima and sums [B, H, M], of a row's scores and their exponentials, unless empty."""
    (H, D, scale), (q, k, v, out, maxima, sums), bias = sizes, borrowed(planes), borrowed(bias)
    (query_start, query_slot, query_at), (key_start, slots, key_at) = borrowed(rows)
    dropout_keys, threshold, dropout_scale = borrowed(dropout)
    k_t, v_t, q_t, out_t, s, state = borrowed(scratch)
    width, dropped = _padded(D), len(dropout_keys) > 0
    head_key = row_key = splat(np.uint32(0))
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(-(-H // LANES)):
            head = LANES * group
            sequence = b, head, min(LANES, H - head)
            heads = sequence[2]
            after = (b, head + LANES, heads) if head + LANES < H else (b + 1, 0, heads)
            _gather_rows(k, sequence, key_at, at, n, D, k_t)
            _gather_rows(v, sequence, key_at, at, n, D, v_t)
            if dropped:
                head_key = _head_keys(dropout_keys[b], group)
            for i in range(query_start[b], query_start[b + 1]):
                row, slot, nth = query_at[i], query_slot[i], i - query_start[b]
                _fetch_row(k, after, key_start, key_at, nth, last, D)
                _fetch_row(v, after, key_start, key_at, nth, last, D)
                _fetch_row(q, after, query_start, query_at, nth, last, D)
                _gather(q, place_of(q, (b, head, row)), heads, D, q_t, 0)
                _scale(q_t, LANES * width, scale)
                _set_to_bias(s, bias, sequence, slot, slots, at, n)
                _add_dots(q_t, k_t, n, width, s)

                m, l = _exponentials(s, n)
                if dropped:
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                    for j in range(n):
                        hashed = pair_hash(row_key, splat(np.uint32(slots[at + j])))
                        store(s, LANES * j, keep_from(load(s, LANES * j), hashed, splat(threshold)))
                _combine(s, v_t, n, width, splat(dropout_scale) / not_zero(l), out_t)
                _scatter(out_t, 0, heads, D, out, place_of(out, (b, head, row)))
                if len(maxima.memory):
                    store(state, 0, m)
                    store(state, LANES, l)
                    _scatter(state, 0, heads, 1, maxima, place_of(maxima, (b, head, row)))
                    _scatter(state, LANES, heads, 1, sums, place_of(sums, (b, head, row)))


@_part
def _softmax_backward(s, dp, kept, delta, row_key, keys, dropout):
    """s and dp [n], scores and what their weights receive, become p and ds; ``kept`` the weights that out had."""
    (slots, at, n), (dropout_keys, threshold, dropout_scale) = keys, dropout
    # p is made as in the forward pass: exp(s - lse) would carry the rounding of lse
    _, l = _exponentials(s, n)
    inverse = splat(_ONE) / not_zero(l)
    for first in range(0, n, _IN_A_SUM):
        part = splat(_ZERO)
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


@jit(nogil=True)
def _backward(first, last, sizes, planes, d_learned, rows, bias, dropout, scratch):
    """Sequences first..last; gradients are written, those of a table or weight added to ``d_learned``, unless empty."""
    (H, D, scale), (q, k, v, d_out, deltas, dq, dk, dv, d_dense), bias = sizes, borrowed(planes), borrowed(bias)
    (query_start, query_slot, query_at), (key_start, slots, key_at) = borrowed(rows)
    dropout, d_learned = borrowed(dropout), borrowed(d_learned)
    k_t, v_t, dk_t, dv_t, q_t, d_out_t, dq_t, s, dp, kept, d_table, state = borrowed(scratch)
    width, of_group = _padded(D), LANES * bias.at.num_learned
    head_key = row_key = splat(np.uint32(0))
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(-(-H // LANES)):
            head = LANES * group
            sequence = b, head, min(LANES, H - head)
            heads = sequence[2]
            after = (b, head + LANES, heads) if head + LANES < H else (b + 1, 0, heads)
            _gather_rows(k, sequence, key_at, at, n, D, k_t)
            _gather_rows(v, sequence, key_at, at, n, D, v_t)
            _fill(dk_t, LANES * width * n, _ZERO)
            _fill(dv_t, LANES * width * n, _ZERO)
            if len(dropout.keys):
                head_key = _head_keys(dropout.keys[b], group)
            for i in range(query_start[b], query_start[b + 1]):
                row, slot, nth = query_at[i], query_slot[i], i - query_start[b]
                _fetch_row(k, after, key_start, key_at, nth, last, D)
                _fetch_row(v, after, key_start, key_at, nth, last, D)
                _fetch_row(q, after, query_start, query_at, nth, last, D)
                _fetch_row(d_out, after, query_start, query_at, nth, last, D)
                _gather(q, place_of(q, (b, head, row)), heads, D, q_t, 0)
                _scale(q_t, LANES * width, scale)
                _gather(d_out, place_of(d_out, (b, head, row)), heads, D, d_out_t, 0)
                _set_to_bias(s, bias, sequence, slot, slots, at, n)
                _add_dots(q_t, k_t, n, width, s)
                _fill(dp, LANES * _padded(n), _ZERO)
                _add_dots(d_out_t, v_t, n, width, dp)
                delta = splat(_ZERO)
                if len(deltas.memory):
                    _gather(deltas, place_of(deltas, (b, head, row)), heads, 1, state, 0)
                    delta = load(state, 0)
                if len(dropout.keys):
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                _softmax_backward(s, dp, kept, delta, row_key, (slots, at, n), dropout)

                _add_outer(kept, d_out_t, n, width, dv_t)
                _add_outer(dp, q_t, n, width, dk_t)
                _combine(dp, k_t, n, width, splat(scale), dq_t)
                _scatter(dq_t, 0, heads, D, dq, place_of(dq, (b, head, row)))
                if len(d_learned) or len(d_dense.memory):
                    _add_bias_gradient(dp, bias, d_table, d_dense, sequence, slot, (slots, at, n))
                    if (nth + 1) % _ROWS_IN_A_SUM == 0 or i + 1 == query_start[b + 1]:
                        _add(d_table, of_group, d_learned, group * of_group)
                        _fill(d_table, of_group, _ZERO)
            for j in range(n):
                place = b, head, key_at[at + j]
                _scatter(dk_t, LANES * width * j, heads, D, dk, place_of(dk, place))
                _scatter(dv_t, LANES * width * j, heads, D, dv, place_of(dv, place))


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
        _forward(first, last, (H, D, scale), planes, (queries, keys), bias, dropout, scratch)

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
    width_of_share = 0 if d_learned is None else len(bias.learned)
    shares = np.zeros((CHUNKS * torch.get_num_threads(), width_of_share), np.float32)

    def run(chunk: int, first: int, last: int) -> None:
        size, width = _up(_longest(keys, first, last)), _up(D)
        sizes = (size * width,) * 4 + (width,) * 3 + (size,) * 3 + (bias.at.num_learned, 1)
        scratch = _scratch(*sizes)
        _backward(first, last, (H, D, scale), planes, shares[chunk], (queries, keys), bias, dropout, scratch)

    in_threads(run, _costs(H, queries, keys), _SCORES_PER_THREAD)
    if d_learned is not None and dense is None:
        total = torch.from_numpy(shares.sum(axis=0)).view(_num_groups(H), -1, LANES)
        d_learned += total.transpose(1, 2).flatten(0, 1)[:H, : d_learned.shape[1]]
    for x, y in zip(given, written, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
