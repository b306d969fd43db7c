"""Attention over listed pairs on a CPU: one row of a relation at a time, eight heads side by side.

A row of queries walks its list of keys, forward and for dq and the gradient of the bias; then a key walks the list of
its queries, for dk and dv. Nothing is kept of a pair but its data: scores are made anew from lse. As in ``rows``, a
vector holds the same number of eight heads, so nothing crosses lanes: a pair of heads of width D takes 2 D loads and
multiply-adds forward, and one exponential for all eight heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.bias import masked_table
from megagraph.attention.cpu.dropout import pair_hash
from megagraph.attention.cpu.lanes import PAIRS_PER_THREAD, in_lanes, table_in_lanes
from megagraph.attention.cpu.pair import (
    CHUNK,
    Lists,
    PairBias,
    Work,
    add_combined,
    add_to_table,
    bias_of,
    dots,
    end_of_equals,
    first_from,
    own_numbers,
    put,
    row_key_of,
)
from megagraph.attention.cpu.row import fill, gather, head_keys_of, num_groups, padded, rescale, scatter, up, zeros
from megagraph.attention.cpu.views import DENSE, FORMS, memory, number_of, place_of, plane, side_by_side
from megagraph.attention.dropout import dropout_threshold
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.simd import (
    LANES,
    borrowed,
    exp,
    finite,
    item,
    keep_from,
    load,
    maximum,
    multiply_add,
    not_zero,
    splat,
    store,
)
from megagraph.threads import CHUNKS, in_threads

_TOGETHER = 32  # rows, or keys, whose lists are the same: what these name is read once for all of them
_ROWS_IN_A_SUM = 32  # of the gradient of a table, before it goes into a sum of doubles


@jit(nogil=True)
def _forward(first, last, call, planes, keys, firsts, scratch):
    """Rows first..last of the relations, of every sequence that they are of."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (q, m_state, l_state, acc, out, lse), (k_t, v_t), (is_first, is_last) = borrowed(planes), borrowed(keys), firsts
    M, H, D, num = work.M, work.H, work.D, k_t.dtype.type
    width, groups, (starts, columns) = padded(D), -(-H // LANES), (lists.row_starts, lists.columns)
    size, zero, minus_inf, listed = LANES * width, num(0), num(-np.inf), first
    q_t, totals, maxima, sums, s, lane, places = borrowed(scratch)
    while listed < last:
        beyond = end_of_equals(starts, columns, listed, min(last, (listed // M + 1) * M), _TOGETHER)
        together, first_row = beyond - listed, listed % M
        for b in range(0 if work.shared else listed // M, work.S if work.shared else listed // M + 1):
            for group in range(groups):
                head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * work.num_keys
                for i in range(together):
                    place = b, head, first_row + i
                    gather(q, place_of(q, place), heads, D, q_t, i * size)
                    rescale(q_t, i * size, size, splat(work.scale))
                    if not is_first:
                        store(maxima, LANES * i, own_numbers(m_state, b, group, first_row + i, heads, lane))
                        store(sums, LANES * i, own_numbers(l_state, b, group, first_row + i, heads, lane))
                        gather(acc, place_of(acc, place), heads, D, totals, i * size)
                if is_first:
                    fill(maxima, LANES * together, minus_inf)
                    fill(sums, LANES * together, zero)
                    fill(totals, size * together, zero)
                for segment in range(len(work.segments)):
                    key, column, length = work.segments[segment]
                    start = first_from(columns, starts[listed], starts[listed + 1], column)
                    end = first_from(columns, start, starts[listed + 1], column + length)
                    for chunk in range(start, end, CHUNK):
                        n = min(CHUNK, end - chunk)
                        for j in range(n):
                            places[j] = (base + np.intp(item(columns, chunk + j)) - column + key) * size
                        dots(q_t, 0, together, k_t, places, n, width, s)
                        for i in range(together):
                            row_key = row_key_of(dropout_keys, b * groups + group, row_ids[first_row + i])
                            pair, m = chunk + starts[listed + i] - starts[listed], load(maxima, LANES * i)
                            before, of = m, CHUNK * i
                            for j in range(n):
                                x = load(s, LANES * (of + j)) + bias_of(pair + j, bias, group, heads, H, lane)
                                if len(padding) and padding[b, item(columns, chunk + j)]:
                                    x = splat(minus_inf)
                                m = maximum(m, x)
                                store(s, LANES * (of + j), x)
                            pivot, part = finite(m), splat(zero)
                            factor = exp(before - pivot)
                            for j in range(n):
                                p = exp(load(s, LANES * (of + j)) - pivot)
                                part = part + p
                                if len(dropout_keys):
                                    hashed = pair_hash(
                                        row_key, splat(np.uint32(item(column_ids, item(columns, chunk + j))))
                                    )
                                    p = keep_from(p, hashed, splat(work.threshold))
                                store(s, LANES * (of + j), p)
                            store(maxima, LANES * i, m)
                            store(sums, LANES * i, multiply_add(load(sums, LANES * i), factor, part))
                            rescale(totals, i * size, size, factor)
                        add_combined(s, v_t, places, n, width, totals, together)
                for i in range(together):
                    place, l = (b, head, first_row + i), load(sums, LANES * i)
                    if is_last:
                        rescale(totals, i * size, size, splat(work.keep) / not_zero(l))
                        scatter(totals, i * size, heads, D, out, place_of(out, place))
                        scatter(maxima, LANES * i, heads, 1, lse, place_of(lse, place))
                        for other in range(heads):
                            lse.memory[place_of(lse, (b, head + other, first_row + i))] += np.log(
                                sums[LANES * i + other]
                            )
                    else:
                        scatter(totals, i * size, heads, D, acc, place_of(acc, place))
                        scatter(maxima, LANES * i, heads, 1, m_state, place_of(m_state, place))
                        scatter(sums, LANES * i, heads, 1, l_state, place_of(l_state, place))
        listed = beyond


@jit(nogil=True)
def _backward_rows(first, last, call, rows, keys, dq, added, d_learned, scratch):
    """dq of rows first..last, and what they add to the gradient of the bias: doubles [G, width, 8], or of each pair."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (q_t, d_out_t, lse, delta), (k_t, v_t), dq = borrowed(rows), borrowed(keys), borrowed(dq)
    d_table, d_pairs = borrowed(d_learned)
    M, H, D, num = work.M, work.H, work.D, k_t.dtype.type
    width, groups, (starts, columns) = padded(D), -(-H // LANES), (lists.row_starts, lists.columns)
    size, zero, minus_inf, listed = LANES * width, num(0), num(-np.inf), first
    dq_t, own, s, dp_t, lane, of_rows, places = borrowed(scratch)
    while listed < last:
        beyond = end_of_equals(starts, columns, listed, min(last, (listed // M + 1) * M), _TOGETHER)
        together, first_row = beyond - listed, listed % M
        for b in range(0 if work.shared else listed // M, work.S if work.shared else listed // M + 1):
            for group in range(groups):
                head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * work.num_keys
                row = (b * groups + group) * M + first_row
                fill(dq_t, size * together, zero)
                for segment in range(len(work.segments)):
                    key, column, length = work.segments[segment]
                    start = first_from(columns, starts[listed], starts[listed + 1], column)
                    end = first_from(columns, start, starts[listed + 1], column + length)
                    for chunk in range(start, end, CHUNK):
                        n = min(CHUNK, end - chunk)
                        for j in range(n):
                            places[j] = (base + np.intp(item(columns, chunk + j)) - column + key) * size
                        dots(q_t, row * size, together, k_t, places, n, width, s)
                        dots(d_out_t, row * size, together, v_t, places, n, width, dp_t)
                        for i in range(together):
                            row_key = row_key_of(dropout_keys, b * groups + group, row_ids[first_row + i])
                            pivot, less, of = load(lse, LANES * (row + i)), load(delta, LANES * (row + i)), CHUNK * i
                            for j in range(n):
                                pair, at_column = (
                                    chunk + j + starts[listed + i] - starts[listed],
                                    item(columns, chunk + j),
                                )
                                x = load(s, LANES * (of + j)) + bias_of(pair, bias, group, heads, H, lane)
                                if len(padding) and padding[b, at_column]:
                                    x = splat(minus_inf)
                                dp = load(dp_t, LANES * (of + j))
                                if len(dropout_keys):
                                    hashed = pair_hash(row_key, splat(np.uint32(item(column_ids, at_column))))
                                    dp = keep_from(dp, hashed, splat(work.threshold)) * splat(work.keep)
                                ds = exp(x - pivot) * (dp - less)
                                store(s, LANES * (of + j), ds)
                                if len(d_table):
                                    add_to_table(of_rows, pair, bias, group, ds)
                                elif len(d_pairs):
                                    store(lane, 0, ds)
                                    for other in range(heads):
                                        d_pairs[pair * H + head + other] += lane[other]
                        add_combined(s, k_t, places, n, width, dq_t, together)
                for i in range(together):
                    rescale(dq_t, i * size, size, splat(work.scale))
                    put(dq_t, i * size, heads, D, dq, (b, head, first_row + i), added, own)
        if len(d_table) and (beyond // _ROWS_IN_A_SUM > listed // _ROWS_IN_A_SUM or beyond == last):
            for i in range(len(d_table)):
                d_table[i] += of_rows[i]
                of_rows[i] = zero
        listed = beyond


@jit(nogil=True)
def _backward_keys(first, last, call, planes, rows, added, scratch):
    """dk and dv of visiting keys first..last."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (k, v, dk, dv), (q_t, d_out_t, lse, delta) = borrowed(planes), borrowed(rows)
    M, H, D, num = work.M, work.H, work.D, q_t.dtype.type
    width, groups, starts = padded(D), -(-H // LANES), lists.key_starts
    size, zero, minus_inf = LANES * width, num(0), num(-np.inf)
    num_columns = (len(starts) - 1) // (1 if work.shared else work.S)
    k_t, v_t, dk_t, dv_t, own, p_t, ds_t, lane, places = borrowed(scratch)
    for segment in range(len(work.segments)):
        first_key, first_column, length = work.segments[segment]
        for b in range(work.S):
            to_list = first_column - first_key + (0 if work.shared else b * num_columns)
            key, last_key = max(first, first_key), min(last, first_key + length)
            while key < last_key:
                listed = key + to_list
                beyond = end_of_equals(starts, lists.key_rows, listed, last_key + to_list, _TOGETHER) - to_list
                together, column = beyond - key, key - first_key + first_column
                for group in range(groups):
                    head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * M
                    for i in range(together):
                        gather(k, place_of(k, (b, head, key + i)), heads, D, k_t, i * size)
                        gather(v, place_of(v, (b, head, key + i)), heads, D, v_t, i * size)
                    fill(dk_t, size * together, zero)
                    fill(dv_t, size * together, zero)
                    for chunk in range(starts[listed], starts[listed + 1], CHUNK):
                        n = min(CHUNK, starts[listed + 1] - chunk)
                        for j in range(n):
                            places[j] = (base + np.intp(item(lists.key_rows, chunk + j))) * size
                        dots(k_t, 0, together, q_t, places, n, width, p_t)
                        dots(v_t, 0, together, d_out_t, places, n, width, ds_t)
                        for i in range(together):
                            of = CHUNK * i
                            for j in range(n):
                                at = chunk + j + starts[listed + i] - starts[listed]
                                row, pair = np.intp(item(lists.key_rows, at)), np.intp(item(lists.key_pairs, at))
                                x = load(p_t, LANES * (of + j)) + bias_of(pair, bias, group, heads, H, lane)
                                if len(padding) and padding[b, column + i]:
                                    x = splat(minus_inf)
                                dp = load(ds_t, LANES * (of + j))
                                p = exp(x - load(lse, LANES * (base + row)))
                                kept = p
                                if len(dropout_keys):
                                    row_key = row_key_of(dropout_keys, b * groups + group, item(row_ids, row))
                                    hashed = pair_hash(row_key, splat(np.uint32(column_ids[column + i])))
                                    kept = keep_from(p, hashed, splat(work.threshold)) * splat(work.keep)
                                    dp = keep_from(dp, hashed, splat(work.threshold)) * splat(work.keep)
                                store(p_t, LANES * (of + j), kept)
                                store(ds_t, LANES * (of + j), p * (dp - load(delta, LANES * (base + row))))
                        add_combined(p_t, d_out_t, places, n, width, dv_t, together)
                        add_combined(ds_t, q_t, places, n, width, dk_t, together)
                    for i in range(together):
                        put(dk_t, i * size, heads, D, dk, (b, head, key + i), added, own)
                        put(dv_t, i * size, heads, D, dv, (b, head, key + i), added, own)
                key = beyond


def _lists(step: Step) -> Lists:
    given = step.row_starts, step.columns, step.key_starts, step.key_rows, step.key_pairs
    return Lists(*(x.contiguous().numpy() for x in given if x is not None))


def _bias(step: Step, compute: torch.dtype) -> PairBias:
    learned, data = step.learned, step.data
    assert learned is not None
    nothing = np.empty(0, number_of(compute))
    if step.form == "dense":
        return PairBias(DENSE, 0, np.empty(0, np.uint8), memory(learned.detach().to(compute).contiguous()), nothing)
    assert data is not None
    table = learned.detach().to(compute)
    buckets, numbers = np.empty(0, np.uint8), nothing
    if step.form == "bucket":
        table, buckets = masked_table(table), memory(data.contiguous())
    else:
        numbers = memory(data.to(compute).contiguous())
    return PairBias(FORMS[step.form], table.shape[1], buckets, numbers, table_in_lanes(table))


def _dropout(step: Step, H: int, M: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys uint32 [S, G, 8], flat, or none, padding bool [S, N] or none, and the global row and column of each, if any
    are asked."""
    keys = head_keys_of(step, H)
    padding = np.empty((0, 0), bool) if step.key_padding_mask is None else step.key_padding_mask.contiguous().numpy()
    rows = torch.arange(M, device="cpu") if step.row_ids is None else step.row_ids.long()
    columns = step.column_ids
    if columns is None:
        assert step.key_starts is not None
        columns = torch.arange(len(step.key_starts) if len(keys) else 0, dtype=torch.int32, device="cpu")
    return keys, padding, rows.numpy(), columns.numpy()


def _work(step: Step, q: Tensor, k: Tensor, number: type) -> Work:
    assert step.row_starts is not None
    (S, H, M, D), dropped = q.shape, step.dropout_key is not None
    return Work(
        S=S,
        H=H,
        M=M,
        D=D,
        num_keys=k.shape[2],
        shared=len(step.row_starts) - 1 == M,
        scale=number(step.scale),
        keep=number(1.0 / (1.0 - step.dropout_p) if dropped else 1.0),
        threshold=np.uint32(dropout_threshold(step.dropout_p)),
        segments=np.array(step.segments, np.int64).reshape(-1, 3),
    )


def _costs(starts: np.ndarray, work: Work) -> np.ndarray:
    """Pairs of every list, over all heads and sequences that read it; a list itself costs as two of them."""
    return (np.diff(starts) + 2) * (num_groups(work.H) * (work.S if work.shared else 1))


def _walk(run: Callable[..., None], costs: np.ndarray, compute: torch.dtype, *sizes: int) -> None:
    """run(chunk, first, last, scratch) in threads; each has arrays of so many vectors, and the places of a chunk."""
    free = [(*zeros(compute, *sizes), np.zeros(CHUNK, np.int64)) for _ in range(torch.get_num_threads())]

    def run_with_scratch(chunk: int, first: int, last: int) -> None:
        scratch = free.pop()
        run(chunk, first, last, scratch)
        free.append(scratch)

    in_threads(run_with_scratch, costs, PAIRS_PER_THREAD)


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    """Fold the visiting keys k, v [B, H, n, D] that are listed into the state of q [B, H, M, D], or into its result."""
    compute = torch.promote_types(q.dtype, torch.float32)
    work, out = _work(step, q, k, number_of(compute)), state.out
    call = work, _lists(step), _bias(step, compute), _dropout(step, work.H, work.M)
    if out is not None:
        out = out if out.dtype == compute and out.stride(-1) == 1 else out.new_empty(out.shape, dtype=compute)
    planes = tuple(plane(x, compute) for x in (q.to(compute), state.m, state.l, state.acc, out, state.lse))
    keys, rows = in_lanes(compute, k, v), _TOGETHER * up(work.D)

    def run(_: int, first: int, last: int, scratch: tuple) -> None:
        _forward(first, last, call, planes, keys, (state.first, state.last), scratch)

    sizes = rows, rows, _TOGETHER, _TOGETHER, _TOGETHER * CHUNK, 1
    _walk(run, _costs(call[1].row_starts, work), compute, *sizes)
    if state.out is not None and out is not None and state.out is not out:
        state.out.copy_(out)


def backward(step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients) -> None:
    """This step's share of the gradients; that of a dense bias [P, H] is added, too."""
    compute, d_learned = torch.promote_types(q.dtype, torch.float32), gradients.d_learned
    work, bias = _work(step, q, k, number_of(compute)), _bias(step, compute)
    call = work, _lists(step), bias, _dropout(step, work.H, work.M)
    q, k, v, d_out = (x.to(compute) for x in (q, k, v, gradients.d_out))
    d_pairs = q.new_zeros(bias.numbers.shape if step.form == "dense" and d_learned is not None else 0)
    d_tables = np.zeros((CHUNKS * torch.get_num_threads(), 0 if d_learned is None else len(bias.learned)), np.float64)
    lanes = in_lanes(compute, q, d_out, gradients.lse, gradients.delta, k, v, scale=step.scale)
    rows, keys, added = lanes[:4], lanes[4:], gradients.accumulate
    with _written(gradients.dq, compute) as dq:
        _run_rows(compute, call, (rows, keys, plane(dq, compute)), added, (d_tables, d_pairs.numpy()))
    if not gradients.accumulate and work.segments[:, 2].sum() < work.num_keys:
        for x in (gradients.dk, gradients.dv):  # keys of no segment
            x.zero_()
    with _written(gradients.dk, compute) as dk, _written(gradients.dv, compute) as dv:
        _run_keys(compute, call, tuple(plane(x, compute) for x in (k, v, dk, dv)), rows, added)
    if d_learned is not None and step.form == "dense":
        d_learned += d_pairs.view(d_learned.shape)
    elif d_learned is not None:
        total = torch.from_numpy(d_tables.sum(axis=0)).view(1, num_groups(work.H), -1, LANES).to(d_learned.dtype)
        gradients.sum_of_learned(total.transpose(2, 3).flatten(1, 2)[:, : work.H, : d_learned.shape[1]])


def _run_rows(
    compute: torch.dtype, call: tuple, operands: tuple, added: bool, sums: tuple[np.ndarray, np.ndarray]
) -> None:
    (work, lists, *_), (d_tables, d_pairs), scores = call, sums, _TOGETHER * CHUNK

    def run(chunk: int, first: int, last: int, scratch: tuple) -> None:
        _backward_rows(first, last, call, *operands, added, (d_tables[chunk], d_pairs), scratch)

    sizes = _TOGETHER * up(work.D), up(work.D), scores, scores, 1, d_tables.shape[1] // LANES
    _walk(run, _costs(lists.row_starts, work), compute, *sizes)


def _run_keys(compute: torch.dtype, call: tuple, planes: tuple, rows: tuple, added: bool) -> None:
    work = call[0]

    def run(_: int, first: int, last: int, scratch: tuple) -> None:
        _backward_keys(first, last, call, planes, rows, added, scratch)

    sizes = *[_TOGETHER * up(work.D)] * 4, up(work.D), *[_TOGETHER * CHUNK] * 2, 1
    _walk(run, _costs_of_keys(call[1], work), compute, *sizes)


@contextmanager
def _written(x: Tensor, compute: torch.dtype) -> Iterator[Tensor]:
    """x, or what will be copied into it, in ``compute`` with the last axis contiguous."""
    there = side_by_side(x.to(compute))
    yield there
    if there is not x:
        x.copy_(there)


def _costs_of_keys(lists: Lists, work: Work) -> np.ndarray:
    """Cost of every visiting key, over all heads and sequences."""
    costs, counts = np.ones(work.num_keys, np.int64), np.diff(lists.key_starts)
    if not work.shared:
        counts = counts.reshape(work.S, -1).sum(axis=0)
    for key, column, length in work.segments:
        costs[key : key + length] += counts[column : column + length]
    return costs * (num_groups(work.H) * (work.S if work.shared else 1))
