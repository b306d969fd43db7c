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
from megagraph.attention.cpu.row import (
    ROWS_IN_A_SUM,
    ZERO,
    Dropout,
    add,
    add_bias_gradient,
    add_dots,
    add_outer,
    combine,
    exponentials,
    fetch_row,
    fill,
    gather,
    gather_rows,
    head_keys_of,
    num_groups,
    padded,
    rescale,
    scatter,
    set_to_bias,
    softmax_backward,
    up,
    zeros,
)
from megagraph.attention.cpu.views import BiasArrays, bias_arrays, place_of, plane
from megagraph.attention.dropout import dropout_threshold
from megagraph.attention.packing import Rows
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.simd import LANES, borrowed, keep_from, load, not_zero, splat, store
from megagraph.threads import CHUNKS, in_threads

_SCORES_PER_THREAD = 1 << 15


class _Pairs(NamedTuple):
    """Which queries and keys meet, and what is known of a pair beside its score."""

    queries: Rows
    keys: Rows
    bias: BiasArrays
    dropout: Dropout


@jit(nogil=True)
def _forward(first, last, sizes, planes, pairs, scratch):
    """Sequences first..last; maxima and sums [B, H, M], of a row's scores and their exponentials, unless empty."""
    (H, D, scale), (q, k, v, out, maxima, sums), pairs = sizes, borrowed(planes), borrowed(pairs)
    (query_start, query_slot, query_at), (key_start, slots, key_at), bias, dropout = pairs
    dropout_keys, threshold, dropout_scale = dropout
    k_t, v_t, q_t, out_t, s, state = borrowed(scratch)
    width, groups, dropped = padded(D), -(-H // LANES), len(dropout_keys) > 0
    head_key = row_key = splat(np.uint32(0))
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(groups):
            head = LANES * group
            sequence = b, head, min(LANES, H - head)
            heads = sequence[2]
            after = (b, head + LANES, heads) if head + LANES < H else (b + 1, 0, heads)
            gather_rows(k, sequence, key_at, at, n, D, k_t)
            gather_rows(v, sequence, key_at, at, n, D, v_t)
            if dropped:
                head_key = load(dropout_keys, LANES * (b * groups + group))
            for i in range(query_start[b], query_start[b + 1]):
                row, slot, nth = query_at[i], query_slot[i], i - query_start[b]
                fetch_row(k, after, key_start, key_at, nth, last, D)
                fetch_row(v, after, key_start, key_at, nth, last, D)
                fetch_row(q, after, query_start, query_at, nth, last, D)
                gather(q, place_of(q, (b, head, row)), heads, D, q_t, 0)
                rescale(q_t, 0, LANES * width, splat(scale))
                set_to_bias(s, bias, sequence, slot, slots, at, n)
                add_dots(q_t, k_t, n, width, s)

                m, l = exponentials(s, n)
                if dropped:
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                    for j in range(n):
                        hashed = pair_hash(row_key, splat(np.uint32(slots[at + j])))
                        store(s, LANES * j, keep_from(load(s, LANES * j), hashed, splat(threshold)))
                combine(s, v_t, n, width, splat(dropout_scale) / not_zero(l), out_t)
                scatter(out_t, 0, heads, D, out, place_of(out, (b, head, row)))
                if len(maxima.memory):
                    store(state, 0, m)
                    store(state, LANES, l)
                    scatter(state, 0, heads, 1, maxima, place_of(maxima, (b, head, row)))
                    scatter(state, LANES, heads, 1, sums, place_of(sums, (b, head, row)))


@jit(nogil=True)
def _backward(first, last, sizes, planes, d_learned, pairs, scratch):
    """Sequences first..last; gradients are written, those of a table or weight added to ``d_learned``, unless empty."""
    (H, D, scale), (q, k, v, d_out, deltas, dq, dk, dv, d_dense), pairs = sizes, borrowed(planes), borrowed(pairs)
    (query_start, query_slot, query_at), (key_start, slots, key_at), bias, dropout = pairs
    d_learned = borrowed(d_learned)
    k_t, v_t, dk_t, dv_t, q_t, d_out_t, dq_t, s, dp, kept, d_table, state = borrowed(scratch)
    width, groups, of_group = padded(D), -(-H // LANES), LANES * bias.at.num_learned
    head_key = row_key = splat(np.uint32(0))
    for b in range(first, last):
        at, n = key_start[b], key_start[b + 1] - key_start[b]
        for group in range(groups):
            head = LANES * group
            sequence = b, head, min(LANES, H - head)
            heads = sequence[2]
            after = (b, head + LANES, heads) if head + LANES < H else (b + 1, 0, heads)
            gather_rows(k, sequence, key_at, at, n, D, k_t)
            gather_rows(v, sequence, key_at, at, n, D, v_t)
            fill(dk_t, LANES * width * n, ZERO)
            fill(dv_t, LANES * width * n, ZERO)
            if len(dropout.keys):
                head_key = load(dropout.keys, LANES * (b * groups + group))
            for i in range(query_start[b], query_start[b + 1]):
                row, slot, nth = query_at[i], query_slot[i], i - query_start[b]
                fetch_row(k, after, key_start, key_at, nth, last, D)
                fetch_row(v, after, key_start, key_at, nth, last, D)
                fetch_row(q, after, query_start, query_at, nth, last, D)
                fetch_row(d_out, after, query_start, query_at, nth, last, D)
                gather(q, place_of(q, (b, head, row)), heads, D, q_t, 0)
                rescale(q_t, 0, LANES * width, splat(scale))
                gather(d_out, place_of(d_out, (b, head, row)), heads, D, d_out_t, 0)
                set_to_bias(s, bias, sequence, slot, slots, at, n)
                add_dots(q_t, k_t, n, width, s)
                fill(dp, LANES * padded(n), ZERO)
                add_dots(d_out_t, v_t, n, width, dp)
                delta = splat(ZERO)
                if len(deltas.memory):
                    gather(deltas, place_of(deltas, (b, head, row)), heads, 1, state, 0)
                    delta = load(state, 0)
                if len(dropout.keys):
                    row_key = mix32(head_key ^ splat(np.uint32(slot)))
                softmax_backward(s, dp, kept, delta, row_key, (slots, at, n), dropout)

                add_outer(kept, d_out_t, n, width, dv_t)
                add_outer(dp, q_t, n, width, dk_t)
                combine(dp, k_t, n, width, splat(scale), dq_t)
                scatter(dq_t, 0, heads, D, dq, place_of(dq, (b, head, row)))
                if len(d_learned) or len(d_dense.memory):
                    add_bias_gradient(dp, bias, d_table, d_dense, sequence, slot, (slots, at, n))
                    if (nth + 1) % ROWS_IN_A_SUM == 0 or i + 1 == query_start[b + 1]:
                        add(d_table, of_group, d_learned, group * of_group)
                        fill(d_table, of_group, ZERO)
            for j in range(n):
                place = b, head, key_at[at + j]
                scatter(dk_t, LANES * width * j, heads, D, dk, place_of(dk, place))
                scatter(dv_t, LANES * width * j, heads, D, dv, place_of(dv, place))


def _side_by_side_as(x: Tensor) -> Tensor:
    """x, or a tensor like it whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else torch.zeros_like(x, memory_format=torch.contiguous_format)


def _bias(step: Step, heads: int) -> BiasArrays:
    """The bias of a step, with ``learned`` as [G, R, 8], flat."""
    bias = bias_arrays(step, torch.float32)
    lanes = np.zeros((num_groups(heads) * LANES, bias.at.num_learned), np.float32)
    lanes[:heads] = bias.learned.reshape(heads, -1)
    by_lanes = lanes.reshape(num_groups(heads), LANES, -1).transpose(0, 2, 1)
    return bias._replace(learned=np.ascontiguousarray(by_lanes).reshape(-1))


def _dropout(step: Step, heads: int) -> Dropout:
    if step.dropout_key is None:
        return Dropout(np.empty(0, np.uint32), np.uint32(0), np.float32(1.0))
    keys = head_keys_of(step, heads)
    return Dropout(keys, np.uint32(dropout_threshold(step.dropout_p)), np.float32(1.0 / (1.0 - step.dropout_p)))


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
    pairs, scale = _Pairs(queries, keys, _bias(step, H), _dropout(step, H)), np.float32(step.scale)

    def run(_: int, first: int, last: int) -> None:
        size, width = up(_longest(keys, first, last)), up(D)
        scratch = zeros(torch.float32, size * width, size * width, width, width, size, 2)
        _forward(first, last, (H, D, scale), planes, pairs, scratch)

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
    pairs, scale = _Pairs(queries, keys, _bias(step, H), _dropout(step, H)), np.float32(step.scale)
    width_of_share = 0 if d_learned is None else len(pairs.bias.learned)
    shares = np.zeros((CHUNKS * torch.get_num_threads(), width_of_share), np.float32)

    def run(chunk: int, first: int, last: int) -> None:
        size, width = up(_longest(keys, first, last)), up(D)
        sizes = (size * width,) * 4 + (width,) * 3 + (size,) * 3 + (pairs.bias.at.num_learned, 1)
        scratch = zeros(torch.float32, *sizes)
        _backward(first, last, (H, D, scale), planes, shares[chunk], pairs, scratch)

    in_threads(run, _costs(H, queries, keys), _SCORES_PER_THREAD)
    if d_learned is not None and dense is None:
        total = torch.from_numpy(shares.sum(axis=0)).view(1, num_groups(H), -1, LANES)
        gradients.sum_of_learned(total.transpose(2, 3).flatten(1, 2)[:, :H, : d_learned.shape[1]])
    for x, y in zip(given, written, strict=True):
        if x is not None and y is not None and x is not y:
            x.copy_(y)
