"""The loops that numpy is too slow for, compiled by Numba on their first call and kept on disk.

All take the CSR arrays of an undirected graph of V nodes as ``Graph`` has them (rows ascending, no self loops), and
``place``, int32 [V] of zeros that is zero again when they return: it tells where a node stands in a short list.
"""

from __future__ import annotations

import numpy as np

from megagraph.jit import jit


@jit(nogil=True)
def find(ascending, start, stop, value):
    """Where ``value`` stands in ascending[start:stop], or -1."""
    low, high = np.int64(start), np.int64(stop)
    while low < high:
        middle = (low + high) // 2
        if ascending[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low if low < stop and ascending[low] == value else np.int64(-1)


@jit(nogil=True)
def misplaced(starts, columns, first, row, previous, num_columns, loops):
    """The first of the entries ``columns`` of CSR rows that is out of range, not above the one before it, or a loop.

    Args:
        first, row, previous: the entry that columns[0] is, a row that does not begin after it, and the column of the
            entry before, -1 at the start.
        loops: a row may name itself.

    Returns:
        the row reached, and the position in ``columns``, -1 where all are right.
    """
    stop = starts[row + 1]
    for at in range(len(columns)):
        if first + at == stop:
            while starts[row + 1] == stop:
                row += 1
            stop = starts[row + 1]
            previous = -1
        column = np.int64(columns[at])
        if column <= previous or column >= num_columns or (column == row and not loops):
            return row, at
        previous = column
    return row, -1


@jit(nogil=True)
def pagerank(sources, indptr, indices, alpha, epsilon, limit, known):
    """Forward push for each source; see ``Pagerank``.

    Args:
        known: int32 [V, 2], ``place`` and the degree in A + I side by side: what is new about a node is one read.

    Returns:
        counts int64 [S], nodes int32 and weights float32 of the strongest ``limit`` of each source, falling.
    """
    num_nodes = len(indptr) - 1
    widest = 0
    for source in sources:
        widest = max(widest, indptr[source + 1] - indptr[source])
    # a push settles more than alpha * epsilon * degree of the one unit there is, but for the source's first
    reach = int(min(num_nodes, 2.0 + 2.0 * widest + 1.0 / (alpha * epsilon)))
    touched = np.empty(reach, np.int32)
    degree = np.empty(reach, np.int64)  # of A + I
    residual = np.empty(reach)
    settled = np.empty(reach)
    queue = np.empty(reach, np.int32)
    waits = np.empty(reach, np.bool_)
    heap = np.empty(limit), np.empty(limit, np.int32)
    counts = np.zeros(len(sources), np.int64)
    nodes = np.empty(len(sources) * limit, np.int32)
    weights = np.empty(len(sources) * limit, np.float32)
    total = 0
    for i, source in enumerate(sources):
        touched[0] = source
        degree[0] = indptr[source + 1] - indptr[source] + 1
        residual[0] = 1.0
        settled[0] = 0.0
        known[source, 0] = 1
        size = 1
        queue[0] = 0
        waits[0] = True
        head, length = 0, 1
        while length:
            here = queue[head]
            head = head + 1 if head + 1 < reach else 0
            length -= 1
            waits[here] = False
            mass = residual[here]
            settled[here] += alpha * mass
            share = (1.0 - alpha) * mass / degree[here]
            residual[here] = share  # by the self loop
            start, stop = indptr[touched[here]], indptr[touched[here] + 1]
            for edge in range(start - 1, stop):
                if edge < start:
                    slot = here
                else:
                    node = indices[edge]
                    slot = known[node, 0] - 1
                    if slot < 0:
                        slot = size
                        size += 1
                        known[node, 0] = size
                        touched[slot] = node
                        degree[slot] = known[node, 1]
                        residual[slot] = 0.0
                        settled[slot] = 0.0
                        waits[slot] = False
                    residual[slot] += share
                if not waits[slot] and residual[slot] > epsilon * degree[slot]:
                    waits[slot] = True
                    tail = head + length
                    queue[tail if tail < reach else tail - reach] = slot
                    length += 1
        for slot in range(size):
            known[touched[slot], 0] = 0
        # what waits settles its share too: the bound stays, and a hub's neighbours, all below theirs, are found
        settled[:size] += alpha * residual[:size]
        counts[i] = _strongest(size, touched, degree, settled, heap, nodes[total:], weights[total:])
        total += counts[i]
    return counts, nodes[:total], weights[:total]


@jit(nogil=True)
def _strongest(size, touched, degree, settled, heap, nodes, weights):
    """Write the heaviest but the source, as many as the heap holds, falling; returns how many.

    From the random walk D^-1 (A + I) to ANS-GT's symmetric normalisation.
    """
    heap_weight, heap_node = heap
    kept = 0
    for slot in range(1, size):
        weight = settled[slot] * np.sqrt(degree[0] / degree[slot])
        if weight <= 0.0:
            continue
        if kept < len(heap_weight):
            kept += 1
            _rise(heap_weight, heap_node, kept - 1, weight, touched[slot])
        elif weight > heap_weight[0]:
            _sink(heap_weight, heap_node, kept, weight, touched[slot])
    for left in range(kept - 1, -1, -1):
        nodes[left] = heap_node[0]
        weights[left] = heap_weight[0]
        _sink(heap_weight, heap_node, left, heap_weight[left], heap_node[left])
    return kept


@jit(nogil=True)
def _rise(weights, nodes, at, weight, node):
    """Put an entry into a heap with the smallest weight on top, from its end ``at`` upwards."""
    while at > 0 and weights[(at - 1) // 2] > weight:
        weights[at], nodes[at] = weights[(at - 1) // 2], nodes[(at - 1) // 2]
        at = (at - 1) // 2
    weights[at], nodes[at] = weight, node


@jit(nogil=True)
def _sink(weights, nodes, size, weight, node):
    """Replace the top of a heap of ``size`` entries."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and weights[child + 1] < weights[child]:
            child += 1
        if weights[child] >= weight:
            break
        weights[at], nodes[at] = weights[child], nodes[child]
        at = child
    weights[at], nodes[at] = weight, node


@jit(nogil=True)
def induce(sequences, indptr, indices, place):
    """The edges among the nodes int64 [B, n] of each sequence; -1 is padding, other nodes occur once.

    Returns:
        CSR of [B * n, n]: row starts int64, columns int32, and which entry of ``indices`` each one is, int64.
    """
    num_sequences, n = sequences.shape
    bound = 0
    for b in range(num_sequences):
        for i in range(n):
            node = sequences[b, i]
            if node >= 0:
                bound += min(n, indptr[node + 1] - indptr[node])
    starts = np.zeros(num_sequences * n + 1, np.int64)
    columns = np.empty(bound, np.int32)
    entries = np.empty(bound, np.int64)
    size = 0
    for b in range(num_sequences):
        for j in range(n):
            if sequences[b, j] >= 0:
                place[sequences[b, j]] = j + 1
        for i in range(n):
            node = sequences[b, i]
            if node >= 0:
                start, stop = indptr[node], indptr[node + 1]
                if stop - start <= 4 * n:
                    for edge in range(start, stop):
                        slot = place[indices[edge]]
                        if slot:
                            columns[size] = slot - 1
                            entries[size] = edge
                            size += 1
                else:  # a hub: look the others up in its row
                    for j in range(n):
                        entry = find(indices, start, stop, sequences[b, j])
                        if entry >= 0:
                            columns[size] = j
                            entries[size] = entry
                            size += 1
            starts[b * n + i + 1] = size
        for j in range(n):
            if sequences[b, j] >= 0:
                place[sequences[b, j]] = 0
    return starts, columns[:size], entries[:size]


@jit(nogil=True)
def hops(starts, columns, first, max_distance, out):
    """Hops from the nodes ``first``, first + 1, ... of B graphs to all n nodes of theirs, into uint8 [B, sources, n].

    Pairs further apart than max_distance are left as they are. Breadth-first from 64 sources at a time, a bit for
    each: a hop is one OR over the neighbours. The graphs are [B * n, n], as ``induce`` gives them.
    """
    num_graphs, num_sources, n = out.shape
    reached = np.empty(n, np.uint64)
    after = np.empty(n, np.uint64)
    # the position of a single bit, by its residue (2 is a primitive root of 67)
    position = np.zeros(67, np.uint8)
    bit = np.uint64(1)
    for i in range(64):
        position[bit % np.uint64(67)] = i
        bit = bit << np.uint64(1)
    for b in range(num_graphs):
        for block in range(0, num_sources, 64):
            for node in range(n):
                reached[node] = 0
            for i in range(min(64, num_sources - block)):
                reached[first + block + i] = np.uint64(1) << np.uint64(i)
                out[b, block + i, first + block + i] = 0
            for hop in range(1, max_distance + 1):
                grown = False
                for node in range(n):
                    bits = reached[node]
                    for edge in range(starts[b * n + node], starts[b * n + node + 1]):
                        bits |= reached[columns[edge]]
                    after[node] = bits
                    new = bits ^ reached[node]
                    while new:
                        lowest = new & (~new + np.uint64(1))
                        out[b, block + position[lowest % np.uint64(67)], node] = hop
                        new ^= lowest
                        grown = True
                reached, after = after, reached
                if not grown:
                    break


@jit(nogil=True)
def reach(sources, indptr, indices, num_hops):
    """How many nodes are within ``num_hops`` of each source, itself among them, int64 [S]."""
    counts = np.zeros(len(sources), np.int64)
    touched = np.empty(len(indptr) - 1, np.int64)
    seen = np.zeros(len(indptr) - 1, np.bool_)
    for i, source in enumerate(sources):
        touched[0] = source
        seen[source] = True
        begin, size = 0, 1
        for _ in range(num_hops):
            end = size
            for at in range(begin, end):
                for edge in range(indptr[touched[at]], indptr[touched[at] + 1]):
                    if not seen[indices[edge]]:
                        seen[indices[edge]] = True
                        touched[size] = indices[edge]
                        size += 1
            begin = end
        for at in range(size):
            seen[touched[at]] = False
        counts[i] = size
    return counts


@jit(nogil=True)
def quotient(indptr, indices, parts, members, starts):
    """Edges between parts: CSR data float32, columns int32 in no order, row starts int64.

    Args:
        parts: int32 [V], of every node.
        members, starts: the nodes of part p are members[starts[p] : starts[p + 1]].
    """
    num_parts = len(starts) - 1
    number = np.zeros(num_parts, np.int64)
    rows = np.zeros(num_parts + 1, np.int64)
    columns, data = np.empty(num_parts, np.int32), np.empty(num_parts, np.float32)
    for part in range(num_parts):
        size = rows[part]
        if size + num_parts > len(columns):
            columns = np.append(columns, np.empty(size + num_parts, np.int32))
            data = np.append(data, np.empty(size + num_parts, np.float32))
        for node in members[starts[part] : starts[part + 1]]:
            for edge in range(indptr[node], indptr[node + 1]):
                other = parts[indices[edge]]
                if number[other] == 0:
                    columns[size] = other
                    size += 1
                number[other] += 1
        for entry in range(rows[part], size):
            data[entry] = number[columns[entry]]
            number[columns[entry]] = 0
        rows[part + 1] = size
    return data[:size], columns[:size], rows
