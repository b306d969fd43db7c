"""Attention over listed pairs on a CPU: one row of a relation at a time, eight heads side by side.

A row of queries walks its list of keys, forward and for dq and the gradient of the bias; then a key walks the list of
its queries, for dk and dv. Nothing is kept of a pair but its data: scores are made anew from lse. As in ``rows``, a
vector holds the same number of eight heads, so nothing crosses lanes: a pair of heads of width D takes 2 D loads and
multiply-adds forward, and one exponential for all eight heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from megagraph.attention import reuse
from megagraph.attention.bias import masked_table
from megagraph.attention.cpu.dropout import pair_hash
from megagraph.attention.cpu.pair import (
    Lists,
    PairBias,
    Work,
    add_combined,
    bias_of,
    dot,
    first_from,
    own_numbers,
    put,
    row_key_of,
    to_lanes,
)
from megagraph.attention.cpu.row import fill, gather, head_keys_of, num_groups, padded, rescale, scatter, up, zeros
from megagraph.attention.cpu.simd import (
    LANES,
    borrowed,
    exp,
    finite,
    keep_from,
    load,
    maximum,
    multiply_add,
    not_zero,
    splat,
    store,
)
from megagraph.attention.cpu.views import BUCKET, DENSE, PROJECTED, memory, place_of, plane, side_by_side
from megagraph.attention.dropout import dropout_threshold
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.threads import CHUNKS, in_threads

_CHUNK = 32  # pairs at a time: their keys and values stay in the first level of the cache
_ROWS_IN_A_SUM = 32  # of the gradient of a table, before it goes into a sum of doubles
_PAIRS_PER_THREAD = 1 << 12
_FORMS = {"bucket": BUCKET, "projected": PROJECTED, "dense": DENSE}


@jit(nogil=True)
def _forward(first, last, call, planes, keys, firsts, scratch):
    """Rows first..last of the relations, of every sequence that they are of."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (q, m_state, l_state, acc, out, lse), (k_t, v_t), (is_first, is_last) = borrowed(planes), borrowed(keys), firsts
    M, H, D, num = work.M, work.H, work.D, k_t.dtype.type
    width, groups, columns = padded(D), -(-H // LANES), lists.columns
    size = LANES * width
    zero, minus_inf = num(0), num(-np.inf)
    q_t, total, s, lane, places = borrowed(scratch)
    for listed in range(first, last):
        row = listed % M
        for b in range(0 if work.shared else listed // M, work.S if work.shared else listed // M + 1):
            for group in range(groups):
                head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * work.num_keys
                place = b, head, row
                gather(q, place_of(q, place), heads, D, q_t, 0)
                rescale(q_t, size, splat(work.scale))
                row_key = row_key_of(dropout_keys, b * groups + group, row_ids[row])
                m, l = splat(minus_inf), splat(zero)
                if is_first:
                    fill(total, size, zero)
                else:
                    m, l = (
                        own_numbers(m_state, b, group, row, heads, lane),
                        own_numbers(l_state, b, group, row, heads, lane),
                    )
                    gather(acc, place_of(acc, place), heads, D, total, 0)
                for segment in range(len(work.segments)):
                    key, column, length = work.segments[segment]
                    start = first_from(columns, lists.row_starts[listed], lists.row_starts[listed + 1], column)
                    end = first_from(columns, start, lists.row_starts[listed + 1], column + length)
                    for chunk in range(start, end, _CHUNK):
                        n, before = min(_CHUNK, end - chunk), m
                        for j in range(n):
                            at_column = np.intp(columns[chunk + j])
                            places[j] = (base + at_column - column + key) * size
                            x = dot(q_t, k_t, places[j], width)
                            x = x + bias_of(chunk + j, bias, group, heads, H, lane)
                            if len(padding) and padding[b, at_column]:
                                x = splat(minus_inf)
                            m = maximum(m, x)
                            store(s, LANES * j, x)
                        pivot, part = finite(m), splat(zero)
                        factor = exp(before - pivot)
                        for j in range(n):
                            p = exp(load(s, LANES * j) - pivot)
                            part = part + p
                            if len(dropout_keys):
                                hashed = pair_hash(row_key, splat(np.uint32(column_ids[columns[chunk + j]])))
                                p = keep_from(p, hashed, splat(work.threshold))
                            store(s, LANES * j, p)
                        l = multiply_add(l, factor, part)
                        rescale(total, size, factor)
                        add_combined(s, v_t, places, n, width, total)
                if is_last:
                    rescale(total, size, splat(work.keep) / not_zero(l))
                    scatter(total, 0, heads, D, out, place_of(out, place))
                    store(lane, 0, m)
                    scatter(lane, 0, heads, 1, lse, place_of(lse, place))
                    store(lane, 0, l)
                    for i in range(heads):
                        lse.memory[place_of(lse, (b, head + i, row))] += np.log(lane[i])
                else:
                    scatter(total, 0, heads, D, acc, place_of(acc, place))
                    store(lane, 0, m)
                    scatter(lane, 0, heads, 1, m_state, place_of(m_state, place))
                    store(lane, 0, l)
                    scatter(lane, 0, heads, 1, l_state, place_of(l_state, place))


@jit(nogil=True)
def _backward_rows(first, last, call, planes, keys, added, d_learned, scratch):
    """dq of rows first..last, and what they add to the gradient of the bias: doubles [G, width, 8], or of each pair."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (q, d_out, lse, delta, dq), (k_t, v_t) = borrowed(planes), borrowed(keys)
    d_table, d_pairs = borrowed(d_learned)
    M, H, D, num = work.M, work.H, work.D, k_t.dtype.type
    width, groups, columns = padded(D), -(-H // LANES), lists.columns
    size, zero, minus_inf = LANES * width, num(0), num(-np.inf)
    q_t, d_out_t, dq_t, own, s, lane, of_rows, places = borrowed(scratch)
    for listed in range(first, last):
        row = listed % M
        for b in range(0 if work.shared else listed // M, work.S if work.shared else listed // M + 1):
            for group in range(groups):
                head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * work.num_keys
                place = b, head, row
                gather(q, place_of(q, place), heads, D, q_t, 0)
                rescale(q_t, size, splat(work.scale))
                gather(d_out, place_of(d_out, place), heads, D, d_out_t, 0)
                row_key = row_key_of(dropout_keys, b * groups + group, row_ids[row])
                pivot, less = (
                    finite(own_numbers(lse, b, group, row, heads, lane)),
                    own_numbers(delta, b, group, row, heads, lane),
                )
                fill(dq_t, size, zero)
                for segment in range(len(work.segments)):
                    key, column, length = work.segments[segment]
                    start = first_from(columns, lists.row_starts[listed], lists.row_starts[listed + 1], column)
                    end = first_from(columns, start, lists.row_starts[listed + 1], column + length)
                    for chunk in range(start, end, _CHUNK):
                        n = min(_CHUNK, end - chunk)
                        for j in range(n):
                            pair, at_column = chunk + j, np.intp(columns[chunk + j])
                            places[j] = (base + at_column - column + key) * size
                            x = dot(q_t, k_t, places[j], width)
                            x = x + bias_of(pair, bias, group, heads, H, lane)
                            if len(padding) and padding[b, at_column]:
                                x = splat(minus_inf)
                            dp = dot(d_out_t, v_t, places[j], width)
                            if len(dropout_keys):
                                hashed = pair_hash(row_key, splat(np.uint32(column_ids[at_column])))
                                dp = keep_from(dp, hashed, splat(work.threshold)) * splat(work.keep)
                            ds = exp(x - pivot) * (dp - less)
                            store(s, LANES * j, ds)
                            if len(d_table):
                                if bias.form == BUCKET:
                                    at = LANES * (group * bias.width + np.intp(bias.buckets[pair]))
                                    store(of_rows, at, load(of_rows, at) + ds)
                                else:
                                    for c in range(bias.width):
                                        at = LANES * (group * bias.width + c)
                                        channel = splat(bias.numbers[pair * bias.width + c])
                                        store(of_rows, at, multiply_add(ds, channel, load(of_rows, at)))
                            elif len(d_pairs):
                                store(lane, 0, ds)
                                for i in range(heads):
                                    d_pairs[pair * H + head + i] += lane[i]
                        add_combined(s, k_t, places, n, width, dq_t)
                rescale(dq_t, size, splat(work.scale))
                put(dq_t, heads, D, dq, place, added, own)
        if len(d_table) and ((listed + 1) % _ROWS_IN_A_SUM == 0 or listed + 1 == last):
            for i in range(len(d_table)):
                d_table[i] += of_rows[i]
                of_rows[i] = zero


@jit(nogil=True)
def _backward_keys(first, last, call, planes, rows, added, scratch):
    """dk and dv of visiting keys first..last."""
    work, lists, bias, (dropout_keys, padding, row_ids, column_ids) = borrowed(call)
    (k, v, dk, dv), (q_t, d_out_t, lse, delta) = borrowed(planes), borrowed(rows)
    M, H, D, num = work.M, work.H, work.D, q_t.dtype.type
    width, groups = padded(D), -(-H // LANES)
    size, zero = LANES * width, num(0)
    k_t, v_t, dk_t, dv_t, own, p_t, ds_t, lane, places = borrowed(scratch)
    num_columns = (len(lists.key_starts) - 1) // (1 if work.shared else work.S)
    for segment in range(len(work.segments)):
        first_key, first_column, length = work.segments[segment]
        for key in range(max(first, first_key), min(last, first_key + length)):
            column = key - first_key + first_column
            for b in range(work.S):
                listed = column if work.shared else b * num_columns + column
                for group in range(groups):
                    head, heads, base = LANES * group, min(LANES, H - LANES * group), (b * groups + group) * M
                    place, hidden = (b, head, key), len(padding) > 0 and padding[b, column]
                    gather(k, place_of(k, place), heads, D, k_t, 0)
                    gather(v, place_of(v, place), heads, D, v_t, 0)
                    fill(dk_t, size, zero)
                    fill(dv_t, size, zero)
                    start, end = lists.key_starts[listed], lists.key_starts[listed + 1]
                    for chunk in range(start, start if hidden else end, _CHUNK):
                        n = min(_CHUNK, end - chunk)
                        for j in range(n):
                            row = np.intp(lists.key_rows[chunk + j])
                            places[j] = (base + row) * size
                            x = dot(k_t, q_t, places[j], width)
                            x = x + bias_of(np.intp(lists.key_pairs[chunk + j]), bias, group, heads, H, lane)
                            dp = dot(v_t, d_out_t, places[j], width)
                            p = exp(x - load(lse, LANES * (base + row)))
                            kept = p
                            if len(dropout_keys):
                                row_key = row_key_of(dropout_keys, b * groups + group, row_ids[row])
                                hashed = pair_hash(row_key, splat(np.uint32(column_ids[column])))
                                kept = keep_from(p, hashed, splat(work.threshold)) * splat(work.keep)
                                dp = keep_from(dp, hashed, splat(work.threshold)) * splat(work.keep)
                            store(p_t, LANES * j, kept)
                            store(ds_t, LANES * j, p * (dp - load(delta, LANES * (base + row))))
                        add_combined(p_t, d_out_t, places, n, width, dv_t)
                        add_combined(ds_t, q_t, places, n, width, dk_t)
                    put(dk_t, heads, D, dk, place, added, own)
                    put(dv_t, heads, D, dv, place, added, own)


def _lanes(x: Tensor, compute: torch.dtype, factor: float = 1.0) -> np.ndarray:
    """[S, H, R, D] as [S, G, R, width, 8], flat, times factor; heads beyond the last are zeros."""
    S, H, R, D = x.shape
    size = S * num_groups(H) * R * up(D) * LANES
    if H % LANES == 0 and up(D) == D:  # all of it is written
        out = reuse.empty_like(torch.empty(size, dtype=compute)).numpy()
    else:
        out = torch.zeros(size, dtype=compute).numpy()
    view = plane(x.to(compute), compute)

    def run(_: int, first: int, last: int) -> None:
        to_lanes(first, last, view, (S, H, R, D), out.dtype.type(factor), out)

    in_threads(run, np.full(R, S * num_groups(H)), _PAIRS_PER_THREAD)
    return out


def _numbers_in_lanes(x: Tensor, compute: torch.dtype) -> np.ndarray:
    """[S, H, R] as [S, G, R, 8], flat."""
    S, H, R = x.shape
    out = torch.zeros(S, num_groups(H) * LANES, R, dtype=compute)
    out[:, :H] = x
    return out.unflatten(1, (-1, LANES)).transpose(2, 3).contiguous().view(-1).numpy()


def _lists(step: Step) -> Lists:
    given = step.row_starts, step.columns, step.key_starts, step.key_rows, step.key_pairs
    return Lists(*(x.contiguous().numpy() for x in given if x is not None))


def _bias(step: Step, compute: torch.dtype) -> PairBias:
    learned, data = step.learned, step.data
    assert learned is not None
    nothing = torch.empty(0, dtype=compute).numpy()
    if step.form == "dense":
        return PairBias(DENSE, 0, np.empty(0, np.uint8), memory(learned.detach().to(compute).contiguous()), nothing)
    assert data is not None
    table = learned.detach().to(compute)
    buckets, numbers = np.empty(0, np.uint8), nothing
    if step.form == "bucket":
        table, buckets = masked_table(table), memory(data.contiguous())
    else:
        numbers = memory(data.to(compute).contiguous())
    return PairBias(_FORMS[step.form], table.shape[1], buckets, numbers, _numbers_in_lanes(table[None], compute))


def _dropout(step: Step, H: int, M: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys uint32 [S, G, 8], flat, or none, padding bool [S, N] or none, and the global row and column of each, if any
    are asked."""
    keys = head_keys_of(step, H)
    padding = torch.empty(0, 0, dtype=torch.bool) if step.key_padding_mask is None else step.key_padding_mask
    rows = torch.arange(M) if step.row_ids is None else step.row_ids.long()
    columns = step.column_ids
    if columns is None:
        assert step.key_starts is not None
        columns = torch.arange(len(step.key_starts) if len(keys) else 0, dtype=torch.int32)
    return keys, padding.contiguous().numpy(), rows.numpy(), columns.numpy()


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


def _scratch(like: np.ndarray, *sizes: int) -> tuple[np.ndarray, ...]:
    """Arrays of so many vectors, and the places of a chunk."""
    return *zeros(torch.from_numpy(like).dtype, *sizes), np.zeros(_CHUNK, np.int64)


def _number(compute: torch.dtype) -> type:
    return torch.empty(0, dtype=compute).numpy().dtype.type


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    """Fold the visiting keys k, v [B, H, n, D] that are listed into the state of q [B, H, M, D], or into its result."""
    compute = torch.promote_types(q.dtype, torch.float32)
    work, out = _work(step, q, k, _number(compute)), state.out
    call = work, _lists(step), _bias(step, compute), _dropout(step, work.H, work.M)
    if out is not None:
        out = out if out.dtype == compute and out.stride(-1) == 1 else torch.empty(out.shape, dtype=compute)
    planes = tuple(plane(x, compute) for x in (q.to(compute), state.m, state.l, state.acc, out, state.lse))
    keys = _lanes(k, compute), _lanes(v, compute)

    def run(_: int, first: int, last: int) -> None:
        scratch = _scratch(keys[0], up(work.D), up(work.D), _CHUNK, 1)
        _forward(first, last, call, planes, keys, (state.first, state.last), scratch)

    in_threads(run, _costs(call[1].row_starts, work), _PAIRS_PER_THREAD)
    if state.out is not None and out is not None and state.out is not out:
        state.out.copy_(out)


def backward(step: Step, q: Tensor, k: Tensor, v: Tensor, gradients: Gradients) -> None:
    """This step's share of the gradients; that of a dense bias [P, H] is added, too."""
    compute, d_learned = torch.promote_types(q.dtype, torch.float32), gradients.d_learned
    work, bias = _work(step, q, k, _number(compute)), _bias(step, compute)
    call = work, _lists(step), bias, _dropout(step, work.H, work.M)
    q, k, v, d_out = (x.to(compute) for x in (q, k, v, gradients.d_out))
    d_pairs = torch.zeros(bias.numbers.shape if step.form == "dense" and d_learned is not None else (0,), dtype=compute)
    d_tables = np.zeros((CHUNKS * torch.get_num_threads(), 0 if d_learned is None else len(bias.learned)), np.float64)
    with _written(gradients.dq, compute) as dq:
        rows = tuple(plane(x, compute) for x in (q, d_out, gradients.lse, gradients.delta, dq))
        _run_rows(
            call, rows, (_lanes(k, compute), _lanes(v, compute)), gradients.accumulate, (d_tables, d_pairs.numpy())
        )
    if not gradients.accumulate:
        for x in (gradients.dk, gradients.dv):  # keys of no segment
            x.zero_()
    with _written(gradients.dk, compute) as dk, _written(gradients.dv, compute) as dv:
        lse = gradients.lse.masked_fill(gradients.lse == -torch.inf, 0.0)
        of_rows = tuple(_numbers_in_lanes(x, compute) for x in (lse, gradients.delta))
        queries = _lanes(q, compute, step.scale), _lanes(d_out, compute), *of_rows
        _run_keys(call, tuple(plane(x, compute) for x in (k, v, dk, dv)), queries, gradients.accumulate)
    if d_learned is not None and step.form == "dense":
        d_learned += d_pairs.view(d_learned.shape)
    elif d_learned is not None:
        total = torch.from_numpy(d_tables.sum(axis=0)).view(num_groups(work.H), -1, LANES)
        d_learned += total.transpose(1, 2).flatten(0, 1)[: work.H, : d_learned.shape[1]].to(d_learned.dtype)


def _run_rows(call: tuple, planes: tuple, keys: tuple, added: bool, sums: tuple[np.ndarray, np.ndarray]) -> None:
    (work, lists, *_), (d_tables, d_pairs) = call, sums

    def run(chunk: int, first: int, last: int) -> None:
        scratch = _scratch(keys[0], *[up(work.D)] * 4, _CHUNK, 1, d_tables.shape[1] // LANES)
        _backward_rows(first, last, call, planes, keys, added, (d_tables[chunk], d_pairs), scratch)

    in_threads(run, _costs(lists.row_starts, work), _PAIRS_PER_THREAD)


def _run_keys(call: tuple, planes: tuple, queries: tuple, added: bool) -> None:
    work = call[0]

    def run(_: int, first: int, last: int) -> None:
        scratch = _scratch(queries[0], *[up(work.D)] * 5, _CHUNK, _CHUNK, 1)
        _backward_keys(first, last, call, planes, queries, added, scratch)

    in_threads(run, _costs_of_keys(call[1], work), _PAIRS_PER_THREAD)


@contextmanager
def _written(x: Tensor, compute: torch.dtype) -> Iterator[Tensor]:
    """x, or what will be copied into it, in ``compute`` with the last axis contiguous."""
    there = side_by_side(x.to(compute))
    yield there
    if there is not x:
        x.copy_(there)


def _costs_of_keys(lists: Lists, work: Work) -> np.ndarray:
    """Of every visiting key, over all sequences."""
    costs, counts = np.ones(work.num_keys, np.int64), np.diff(lists.key_starts)
    if not work.shared:
        counts = counts.reshape(work.S, -1).sum(axis=0)
    for key, column, length in work.segments:
        costs[key : key + length] += counts[column : column + length]
    return costs * (num_groups(work.H) * (work.S if work.shared else 1))
