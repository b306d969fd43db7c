"""The union of several relations among the same nodes, compiled by Numba on its first call."""

from __future__ import annotations

import numpy as np

from megagraph.jit import jit


@jit(nogil=True)
def count_union(order, starts, columns, firsts):
    """How many distinct nodes each slot has in several relations, itself always among them; see ``union``."""
    num_nodes = len(order)
    counts, seen = np.zeros(num_nodes, np.int64), np.full(num_nodes, -1, np.int32)
    for slot in range(num_nodes):
        node = order[slot]
        seen[node] = slot
        count = 1
        for kind in range(len(firsts)):
            for at in range(firsts[kind] + starts[kind, node], firsts[kind] + starts[kind, node + 1]):
                if seen[columns[at]] != slot:
                    seen[columns[at]] = slot
                    count += 1
        counts[slot] = count
    return counts


@jit(nogil=True)
def union(order, place, starts, columns, values, firsts, row_starts, out):
    """Every pair of the first relation that has it, in slots; a node and itself are a pair of value 0.

    Args:
        order, place: the node of every slot, and the slot of every node, [V].
        starts: int64 [K, V + 1], where the pairs of every node begin in its relation.
        columns, values: int32 and uint8 [.], the other node and the value of every pair, one relation after the other.
        firsts: int64 [K], where each relation begins in these.
        row_starts: int64 [V + 1], of ``count_union``.
        out: columns int32 and values uint8, [P] each, written: rows and columns ascend.
    """
    num_nodes, (out_columns, out_values) = len(order), out
    seen = np.full(num_nodes, -1, np.int32)
    for slot in range(num_nodes):
        node, first = order[slot], row_starts[slot]
        keys = np.empty(row_starts[slot + 1] - first, np.int64)  # the column, then the value
        seen[node] = slot
        keys[0] = slot << 8
        count = 1
        for kind in range(len(firsts)):
            for at in range(firsts[kind] + starts[kind, node], firsts[kind] + starts[kind, node + 1]):
                other = columns[at]
                if seen[other] != slot:
                    seen[other] = slot
                    keys[count] = (np.int64(place[other]) << 8) + values[at]
                    count += 1
        keys.sort()
        for i in range(count):
            out_columns[first + i] = keys[i] >> 8
            out_values[first + i] = keys[i] & 255
