"""Entries of the powers of a matrix, and those of pairs of nodes; compiled by Numba on their first call."""

from __future__ import annotations

import numpy as np

from megagraph.jit import jit
from megagraph.simd import LANES, borrowed, item, load, multiply_add, splat, store

_WIDTH = 2 * LANES  # nodes of a panel: a line of the cache
_RUN = 128  # entries that are added up one by one


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
        for power in range(num_powers):  # a slice takes a second to compile
            at[power] = starts[row, power]
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
def pair_powers(starts, columns, values, nodes, first, last, scratch, out):
    """Powers 1..C of a symmetric matrix between slots first .. last - 1 of nodes [B, m], -1 = padding, and all m.

    The first h powers are as ``powers`` leaves them, C <= 2 h. Others are products of their rows:
    A^(h + k)[i, j] = <A^h e_i, A^k e_j>, where A^k e_j has no entry beyond k hops; j is the node of fewer entries, in
    whose order they are added, so that the bits of a pair depend on nothing but the pair.

    Sixteen nodes i are looked at together. A panel has their A^h side by side, one row for each column that any of
    them has, so that an entry of A^k e_j is looked up once for all of them.

    Args:
        scratch: zeros float32 [V], left as they were.
        out: zeros float32 [B, C, last - first, m].
    """
    table = starts, columns, values
    place = scratch.view(np.int32)  # the panel's row of a column; row 0, of zeros, is that of columns without one
    most_entries = 0
    for node in nodes.flat:
        if node >= 0:
            most_entries = max(most_entries, starts[node + 1, 0] - starts[node, 0])
    length = 1 + nodes.shape[1] + min(_WIDTH * most_entries, len(place))
    panel, column_of = np.zeros(length * _WIDTH, np.float32), np.empty(length, np.int32)
    products = np.empty((out.shape[1] - len(values), _WIDTH), np.float32)
    for b in range(len(nodes)):
        slots = _distinct(starts, nodes[b])
        ranks, num_own = _own_first(slots, first, last)
        for left in range(0, len(ranks), _WIDTH):
            group = ranks[left : left + _WIDTH]
            size = _fill(table, nodes[b], slots, group, place, panel, column_of, out[b], first)
            lowest = group.min()
            for rank in ranks if left < num_own else ranks[:num_own]:
                if rank >= lowest:
                    _multiply(table, column_of[1 + rank], place, panel, products)
                    for lane in range(len(group)):
                        if group[lane] <= rank:
                            _write(products[:, lane], slots, group[lane], rank, out[b, len(values) :], first)
            for row in range(1, size):
                place[column_of[row]] = 0
            panel[: size * _WIDTH] = 0


@jit(nogil=True)
def _distinct(starts, nodes):
    """Slots by their node, nodes of many entries first, without padding; and where those of each node begin and end.

    The rank of a node is its place among these.
    """
    order, keys = np.empty(len(nodes), np.int64), np.empty(len(nodes), np.int64)
    size = 0
    for slot in range(len(nodes)):
        node = nodes[slot]
        if node >= 0:
            key = (len(starts) - 1) * (starts[node + 1, 0] - starts[node, 0]) + node
            at = size
            while at > 0 and keys[at - 1] < key:  # most sequences are short, and argsort takes seconds to compile
                keys[at], order[at] = keys[at - 1], order[at - 1]
                at -= 1
            keys[at], order[at] = key, slot
            size += 1
    bounds = np.zeros(size + 1, np.int64)
    num_nodes = 0
    for at in range(size):
        if at == 0 or keys[at] != keys[at - 1]:
            num_nodes += 1
        bounds[num_nodes] = at + 1
    return order, bounds[: num_nodes + 1]


@jit(nogil=True)
def _own_first(slots, first, last):
    """Ranks of nodes with a slot among first .. last - 1, then of the others, both ascending; and how many have one."""
    order, bounds = slots
    own = np.zeros(len(bounds) - 1, np.bool_)
    for rank in range(len(own)):
        for at in range(bounds[rank], bounds[rank + 1]):
            own[rank] |= first <= order[at] < last
    return np.concatenate((np.flatnonzero(own), np.flatnonzero(~own))), own.sum()


@jit(nogil=True)
def _fill(table, nodes, slots, group, place, panel, column_of, out, first):
    """The panel of a group of ranks, and powers 1..h between them and lower ones -> how many rows the panel has."""
    (starts, columns, values), (order, bounds) = table, slots
    columns, place, panel, column_of = borrowed((columns, place, panel, column_of))
    last_power = borrowed(values[-1])
    size = len(bounds)
    for rank in range(size - 1):
        column_of[1 + rank] = nodes[order[bounds[rank]]]
        place[column_of[1 + rank]] = 1 + rank
    for lane in range(len(group)):
        rank = group[lane]
        node = column_of[1 + rank]
        for entry in range(starts[node, 0], starts[node + 1, 0]):
            column = np.int64(item(columns, entry))
            row = np.int64(item(place, column))
            if row == 0:
                row = np.int64(size)
                size += 1
                column_of[row] = column
                place[column] = row
            elif row <= 1 + rank:
                _write(values[:, entry], slots, row - 1, rank, out, first)
            panel[row * _WIDTH + lane] = item(last_power, entry)
    return size


@jit(nogil=True)
def _multiply(table, node, place, panel, products):
    """Powers of a node's row times the panel, [C - h, 16], in two sums, whose additions do not wait.

    Runs of entries are added up, those of many hops first, which are small: a hub has thousands, and one sum in fp32
    of them all would be wrong in the sixth digit.
    """
    starts, columns, values = table
    arrays = borrowed((columns, place, panel))
    zero = splat(np.float32(0))
    start = starts[node, 0]
    for power in range(len(products)):
        stop = starts[node, power + 1] if power + 1 < len(values) else starts[node + 1, 0]
        of_power = borrowed(values[power])
        low, high = zero, zero
        while stop > start:
            begin = max(start, stop - _RUN)
            even, odd = (zero, zero), (zero, zero)
            for entry in range(begin, stop - 1, 2):
                even = _add(even, entry, of_power, arrays)
                odd = _add(odd, entry + 1, of_power, arrays)
            if (stop - begin) % 2:
                even = _add(even, stop - 1, of_power, arrays)
            low, high = low + (even[0] + odd[0]), high + (even[1] + odd[1])
            stop = begin
        store(products[power], 0, low)
        store(products[power], LANES, high)


@jit(nogil=True)
def _add(sums, entry, values, arrays):
    columns, place, panel = arrays
    row = _WIDTH * np.int64(item(place, np.int64(item(columns, entry))))
    value = splat(item(values, entry))
    low = multiply_add(value, load(panel, row), sums[0])
    return low, multiply_add(value, load(panel, row + LANES), sums[1])


@jit(nogil=True)
def _write(pair, slots, i, j, out, first):
    """Numbers [powers] of the nodes of two ranks into out [powers, rows, m], whose rows are the slots from first on."""
    (order, bounds), last = slots, first + out.shape[1]
    for at in range(bounds[i], bounds[i + 1]):
        row = order[at]
        for other in range(bounds[j], bounds[j + 1]):
            column = order[other]
            if first <= row < last:
                for power in range(len(pair)):
                    out[power, row - first, column] = pair[power]
            if first <= column < last:
                for power in range(len(pair)):
                    out[power, column - first, row] = pair[power]
