"""The CPU path: one attention step in tiles of scores, forward and backward.

The same contract as the Triton launchers: scores of the visiting keys are folded into a running max m, sum l and
output acc (FlashAttention, arXiv:2205.14135, Alg. 1; logarithms are natural here), a compact bias is read pair by
pair, never expanded, and the backward recomputes the scores from lse.

A tile has some queries and keys of one head. Its scores stay in the cache from the product that makes them to those
that take them, and each thread works on tiles of its own from start to end, so that only rows of q, k, v and the bias
come from memory. The seven products of a tile are made of ``product_16``; they are most of the time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megagraph.attention.cpu.product import PRODUCT_ROWS
from megagraph.attention.cpu.tile import (
    MOST_KEYS,
    MOST_ROWS,
    WIDE,
    Pairs,
    Sums,
    add_bias,
    add_bias_gradient,
    add_lanes,
    add_rows,
    add_to_keys,
    add_to_rows,
    copy_columns,
    copy_panels,
    copy_row,
    copy_rows,
    fold_rows,
    scores,
    softmax_backward,
    up,
    up_to,
)
from megagraph.attention.cpu.views import Plane, bias_arrays, number_of, place_of, plane, side_by_side
from megagraph.attention.dropout import dropout_threshold, row_keys
from megagraph.attention.step import Gradients, State, Step
from megagraph.jit import jit
from megagraph.simd import LANES
from megagraph.threads import CHUNKS, in_threads

TILE_ROWS, TILE_KEYS = MOST_ROWS, MOST_KEYS  # two tiles of fp32 scores take 184 kB
_ROWS_OF_KEYS = 2 * TILE_ROWS  # that some keys visit before the next: all heads find their bias in the cache
_SCORES_PER_THREAD = 1 << 15


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
    """The softmax so far, as ``step.State`` has it, in planes."""

    m: Plane
    l: Plane
    acc: Plane
    out: Plane
    lse: Plane


@jit(nogil=True)
def _forward(first, last, work, inputs, state, is_first, is_last, pairs):
    """Items (b, h, h_end, row, row_end), over all tiles of keys."""
    q, k, v = inputs
    items, tiles, D = work.items, work.tiles, work.D
    dtype, width = q.memory.dtype, up(D, LANES)
    one, dense = dtype.type(1), pairs.bias.dense
    q_t, k_t = np.zeros(D * MOST_ROWS, dtype), np.zeros(D * MOST_KEYS, dtype)
    s, v_rows = np.zeros(MOST_ROWS * MOST_KEYS, dtype), np.zeros(MOST_KEYS * up(D, WIDE), dtype)
    heads = rows = 0
    for item in range(first, last):
        heads = max(heads, items[item, 2] - items[item, 1])
        rows = max(rows, up(items[item, 4] - items[item, 3], PRODUCT_ROWS))
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
                copy_rows(state.m, carried, num, 1, maxima, at, 1)
                copy_rows(state.l, carried, num, 1, sums, at, 1)
                copy_rows(state.acc, carried, num, D, total, at * width, width)
        for tile in range(len(tiles)):
            key, column, n = tiles[tile]
            padded = up(n, LANES)
            for head in range(h, h_end):
                copy_columns(k, (b, head, key), n, D, one, k_t, MOST_KEYS, padded)
                copy_panels(v, (b, head, key), n, D, one, v_rows, MOST_KEYS)
                for row in range(first_row, end, work.tile_rows):
                    num, at = min(work.tile_rows, end - row), (head - h) * rows + row - first_row
                    full, place = up(num, PRODUCT_ROWS), (b, head, row, column)
                    copy_columns(q, place, num, D, work.scale, q_t, MOST_ROWS, up(full, LANES))
                    scores(q_t, k_t, D, full, padded, s, dense, place)
                    add_bias(s, num, n, padded, pairs, place)
                    fold_rows(s, num, padded, (maxima, sums, total), at, width, pairs, place)
                    add_to_rows(s, v_rows, full, n, width, total, at * width)
        for head in range(h, h_end):
            for row in range(first_row, end):
                at, carried = (head - h) * rows + row - first_row, (b, head, row)
                if is_last:
                    state.lse.memory[place_of(state.lse, carried)] = maxima[at] + np.log(sums[at])
                    factor = one / (sums[at] * work.keep) if sums[at] != 0 else one
                    copy_row(total, at * width, D, factor, state.out.memory, place_of(state.out, carried))
                else:
                    state.m.memory[place_of(state.m, carried)] = maxima[at]
                    state.l.memory[place_of(state.l, carried)] = sums[at]
                    copy_row(total, at * width, D, one, state.acc.memory, place_of(state.acc, carried))


class _Visit(NamedTuple):
    """Rows of a head, and the keys of a tile that visit them."""

    b: int
    h: int
    row: int
    end: int  # of the rows
    key: int
    column: int
    n: int  # keys
    share: int  # of dq: its first axis


@jit()
def _add_gradients(visit, work, inputs, pairs, sums, scratch):
    """What a visit adds to all gradients."""
    (b, h, first_row, end, key, column, n, share), (q, k, v, d_out, lse, delta) = visit, inputs
    D, dq, dense, d_dense = work.D, sums.dq, pairs.bias.dense, sums.dense
    (q_t, q_rows, d_out_t, d_out_rows), (k_t, k_rows, v_t, dk_rows, dv_rows), (s, dp), d_lanes = scratch
    one, width, padded = s.dtype.type(1), up(D, LANES), up(n, LANES)
    of_keys = (b, h, key)
    copy_columns(k, of_keys, n, D, one, k_t, MOST_KEYS, padded)
    copy_columns(v, of_keys, n, D, one, v_t, MOST_KEYS, padded)
    copy_panels(k, of_keys, n, D, work.scale, k_rows, MOST_KEYS)
    dk_rows[:] = 0
    dv_rows[:] = 0
    for row in range(first_row, end, work.tile_rows):
        num, place = min(work.tile_rows, end - row), (b, h, row, column)
        full = up(num, PRODUCT_ROWS)
        copy_columns(q, place, num, D, work.scale, q_t, MOST_ROWS, up(full, LANES))
        copy_panels(q, place, num, D, work.scale, q_rows, MOST_ROWS)
        copy_columns(d_out, place, num, D, work.keep, d_out_t, MOST_ROWS, up(full, LANES))
        copy_panels(d_out, place, num, D, work.keep, d_out_rows, MOST_ROWS)
        scores(q_t, k_t, D, full, padded, s, dense, place)
        scores(d_out_t, v_t, D, full, padded, dp, d_dense, place)
        add_bias(s, num, n, padded, pairs, place)
        softmax_backward(s, dp, num, padded, lse, delta, pairs, place)
        if sums.learned:
            add_bias_gradient(dp, num, n, pairs.bias, d_lanes, sums, place)
        add_to_keys(s, d_out_rows, num, n, width, dv_rows)
        add_to_keys(dp, q_rows, num, n, width, dk_rows)
        add_to_rows(dp, k_rows, full, n, width, dq.memory, place_of(dq, (share, h, row)))
    add_rows(dk_rows, n, D, width, sums.dk, of_keys)
    add_rows(dv_rows, n, D, width, sums.dv, of_keys)


@jit(nogil=True)
def _backward(first, last, work, inputs, pairs, sums, d_learned):
    """Items (b, b_end, h, h_end, tile, tile_end, part), over all rows; d_learned [H, R], flat, of a table or weight."""
    dtype, wide, num_learned = d_learned.dtype, up(work.D, WIDE), pairs.bias.at.num_learned
    room = MOST_ROWS * wide
    of_rows = np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype), np.zeros(room, dtype)
    # a product reads and writes up to a multiple of its rows
    room = (MOST_KEYS + PRODUCT_ROWS) * wide
    of_keys = (
        np.zeros(room, dtype),
        np.zeros(room, dtype),
        np.zeros(room, dtype),
        np.zeros(room, dtype),
        np.zeros(room, dtype),
    )
    room = MOST_ROWS * MOST_KEYS + PRODUCT_ROWS
    of_pairs = np.zeros(room, dtype), np.zeros(room, dtype)
    d_lanes = np.zeros(LANES * num_learned, dtype)
    scratch = of_rows, of_keys, of_pairs, d_lanes
    tiles = work.tiles
    for item in range(first, last):
        b_first, b_end, h, h_end, tile_first, tile_end, part = work.items[item]
        for b in range(b_first, b_end):
            for row in range(0, work.M, work.rows_of_keys):
                end = min(row + work.rows_of_keys, work.M)
                for tile in range(tile_first, tile_end):
                    for head in range(h, h_end):
                        keys = tiles[tile, 0], tiles[tile, 1], tiles[tile, 2]
                        visit = _Visit(b, head, row, end, *keys, part * work.B + b)
                        _add_gradients(visit, work, inputs, pairs, sums, scratch)
                        add_lanes(d_lanes, num_learned, d_learned, head * num_learned)


def _even(length: int, most: int, multiple: int) -> int:
    """The size of as few parts as there can be, about equal, of at most ``most``."""
    size = math.ceil(length / math.ceil(length / most))
    return min(most, up_to(size, multiple))


def _parts(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _tiles(step: Step) -> np.ndarray:
    """(first key, first column, keys) of every tile; none straddles a segment."""
    tiles = [
        (key + start, column + start, end - start)
        for key, column, length in step.segments
        if length
        for start, end in _parts(length, _even(length, TILE_KEYS, WIDE))
    ]
    return np.array(tiles, np.int64).reshape(-1, 3)


def _tile_rows(M: int) -> int:
    return _even(min(M, _ROWS_OF_KEYS), TILE_ROWS, PRODUCT_ROWS)


def _items(*axes: Iterable[tuple[int, ...]]) -> np.ndarray:
    """Every combination, in order, as one row of numbers."""
    return np.array([list(itertools.chain(*item)) for item in itertools.product(*axes)], np.int64)


def _pairs(step: Step, q: Tensor, compute: torch.dtype) -> Pairs:
    keys = None
    if step.dropout_key is not None:
        row_ids = torch.arange(q.shape[2], device="cpu") if step.row_ids is None else step.row_ids
        keys = row_keys(step.dropout_key, q.shape[1], row_ids, step.first_head).contiguous()
    of_rows = plane(keys, torch.int32)
    of_rows = of_rows._replace(memory=of_rows.memory.view(np.uint32))
    padding = np.empty((0, 0), bool) if step.key_padding_mask is None else step.key_padding_mask.contiguous().numpy()
    threshold = np.uint32(dropout_threshold(step.dropout_p))
    return Pairs(bias_arrays(step, compute), padding, of_rows, threshold, step.first_column)


def forward(step: Step, q: Tensor, k: Tensor, v: Tensor, state: State) -> None:
    """Fold the visiting keys k, v [B, H, n, D] into the state of q [B, H, M, D], or into its result."""
    compute = torch.promote_types(q.dtype, torch.float32)
    number = number_of(compute)
    (B, H, M, D), tiles = q.shape, _tiles(step)
    out = state.out
    if out is not None:
        out = out if out.dtype == compute and out.stride(-1) == 1 else out.new_empty(out.shape, dtype=compute)
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
    number = number_of(compute)
    (B, H, M, D), tiles, d_learned = q.shape, _tiles(step), gradients.d_learned
    if not gradients.accumulate:
        for x in (gradients.dk, gradients.dv):
            x.zero_()
    dense = d_learned if step.form == "dense" else None
    given = {"dk": gradients.dk, "dv": gradients.dv} | ({} if dense is None else {"dense": dense})
    sums = {name: side_by_side(x.to(compute)) for name, x in given.items()}
    items, costs = _backward_items(B, H, M, tiles, dense, _heads_share(step))
    # each part of the keys has a dq of its own, or their order would decide the last digits
    num_parts = int(items[:, -1].max()) + 1
    dq_shares = q.new_zeros(num_parts * B, H, up_to(M, PRODUCT_ROWS), up_to(D, LANES), dtype=compute)
    pairs = _pairs(step, q, compute)
    keep_scale = 1.0 if step.dropout_key is None else 1.0 / (1.0 - step.dropout_p)
    read = (q, k, v, gradients.d_out, gradients.lse, gradients.delta)
    inputs = tuple(plane(x.to(compute), compute) for x in read)
    outputs = Sums(
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
        gradients.sum_of_learned(torch.from_numpy(d_tables.sum(axis=0)).view(1, H, -1)[..., : d_learned.shape[1]])
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
