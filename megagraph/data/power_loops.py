"""Entries of the powers of a matrix, and those of pairs of nodes; compiled by Numba on their first call."""

from __future__ import annotations

import numpy as np

from megagraph.data.traversal import find
from megagraph.jit import jit


@jit(nogil=True)
def powers(indptr, indices, data, first, last, starts, columns, values):
    """Rows first .. last - 1 of powers 1..h of a matrix with a full diagonal.

    Fills ``columns`` int32 [entries] and ``values`` float32 [h, entries]. Row i begins at starts[i, 0], with the
    columns within one hop; from starts[i, k] on they are k + 1 hops away. Columns of as many hops ascend. The first
    column of starts, int64 [V + 1, h], is known from ``reach``.
    """
    num_nodes, num_powers = len(indptr) - 1, values.shape[0]
    touched = np.empty(num_nodes, np.int64)
    hops = np.zeros(8 * (num_nodes // 8 + 1), np.uint8)  # and one, of what was touched
    eight = hops.view(np.uint64)
    row_of = np.zeros((num_powers + 1, num_nodes))  # one row of each power, dense
    at = np.empty(num_powers, np.int64)
    for row in range(first, last):
        touched[0] = row
        hops[row] = 1
        row_of[0, row] = 1.0
        size = 1
        for power in range(num_powers):
            for i in range(size):
                node = touched[i]
                mass = row_of[power, node]
                for edge in range(indptr[node], indptr[node + 1]):
                    column = indices[edge]
                    row_of[power + 1, column] += mass * data[edge]
                    if hops[column] == 0:
                        hops[column] = power + 1
                        touched[size] = column
                        size += 1
            if power + 1 < num_powers:
                starts[row, power + 1] = starts[row, 0] + size
        at[:] = starts[row]
        for group in range(len(eight)):  # in ascending order, without sorting
            if eight[group]:
                for column in range(8 * group, 8 * group + 8):
                    if hops[column]:
                        entry = at[hops[column] - 1]
                        at[hops[column] - 1] += 1
                        columns[entry] = column
                        for power in range(num_powers):
                            values[power, entry] = row_of[power + 1, column]
                            row_of[power + 1, column] = 0.0
                        row_of[0, column] = 0.0
                eight[group] = 0


@jit(nogil=True)
def pair_powers(starts, columns, values, nodes, first, last, near, out):
    """Powers 1..C of a symmetric matrix between slots first .. last - 1 of nodes [B, m], -1 = padding, and all m.

    The first h powers are as ``powers`` leaves them, C <= 2 h. Others are products of their rows:
    A^(h + k)[i, j] = <A^h e_i, A^k e_j>, where A^k e_j has no entry beyond k hops; j is the node of fewer entries, so
    that the bits of a pair depend on nothing but the pair.

    Args:
        near: zeros float32 [V], left as they were.
        out: zeros float32 [B, C, last - first, m].
    """
    num_powers, num_nodes = values.shape[0], np.int64(len(near))
    pair = np.empty(out.shape[1], np.float32)
    for b in range(nodes.shape[0]):
        keys = np.empty(nodes.shape[1], np.int64)
        for slot in range(len(keys)):
            node = nodes[b, slot]
            keys[slot] = 1 if node < 0 else -(num_nodes * (starts[node + 1, 0] - starts[node, 0]) + node)
        order = np.argsort(keys)  # nodes of many entries first, the slots of a node in a row, padding last
        ends = _runs(keys[order])
        for i in range(len(ends)):
            slots = order[ends[i - 1] if i else 0 : ends[i]]
            row = nodes[b, slots[0]]
            for entry in range(starts[row, 0], starts[row + 1, 0]):
                near[columns[entry]] = values[num_powers - 1, entry]
            own = _any_within(slots, first, last)
            for j in range(i, len(ends)):
                others = order[ends[j - 1] if j else 0 : ends[j]]
                if own or _any_within(others, first, last):
                    _pair(starts, columns, values, row, nodes[b, others[0]], near, pair)
                    _write(pair, slots, others, first, last, out[b])
                    _write(pair, others, slots, first, last, out[b])
            for entry in range(starts[row, 0], starts[row + 1, 0]):
                near[columns[entry]] = 0


@jit(nogil=True)
def _runs(ordered):
    """Where each run of equal numbers ends, up to the first that is above 0."""
    ends = np.empty(len(ordered), np.int64)
    size = 0
    for at in range(len(ordered)):
        if ordered[at] > 0:
            break
        if at and ordered[at] == ordered[at - 1]:
            ends[size - 1] = at + 1
        else:
            ends[size] = at + 1
            size += 1
    return ends[:size]


@jit(nogil=True)
def _any_within(slots, first, last):
    return np.any((first <= slots) & (slots < last))


@jit(nogil=True)
def _write(pair, rows, columns, first, last, out):
    for row in rows:
        if first <= row < last:
            for column in columns:
                for power in range(len(pair)):
                    out[power, row - first, column] = pair[power]


@jit(nogil=True)
def _pair(starts, columns, values, row, column, near, pair):
    """Powers [C] between a node whose last power is ``near`` and another one."""
    num_powers = values.shape[0]
    pair[:num_powers] = 0
    if near[column] != 0:
        for hop in range(num_powers):
            stop = starts[column, hop + 1] if hop + 1 < num_powers else starts[column + 1, 0]
            entry = find(columns, starts[column, hop], stop, row)
            if entry >= 0:
                pair[:num_powers] = values[:, entry]
                break
    for power in range(len(pair) - num_powers):
        stop = starts[column, power + 1] if power + 1 < num_powers else starts[column + 1, 0]
        pair[num_powers + power] = _dot(columns, values, power, near, starts[column, 0], stop)


@jit(nogil=True)
def _dot(columns, values, power, near, start, stop):
    """Entries start .. stop - 1 of a power times what is near, in four sums, whose additions do not wait."""
    a = b = c = d = np.float32(0)
    four = start + (stop - start) // 4 * 4
    for entry in range(start, four, 4):
        a += values[power, entry] * near[columns[entry]]
        b += values[power, entry + 1] * near[columns[entry + 1]]
        c += values[power, entry + 2] * near[columns[entry + 2]]
        d += values[power, entry + 3] * near[columns[entry + 3]]
    for entry in range(four, stop):
        a += values[power, entry] * near[columns[entry]]
    return (a + b) + (c + d)
