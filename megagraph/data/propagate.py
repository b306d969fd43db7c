"""Balanced clusters by label propagation, in the memory of the graph and a few arrays of one number a node.

Size-constrained label propagation (Meyerhenke, Sanders & Schulz 2014), on nodes, then on clusters, then on nodes again.
Compiled by numba; in one thread, so that a graph has the same clusters each time.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from megagraph.jit import jit

_FEWEST = 0.95  # clusters, of those asked for
_LARGEST = 1.1  # cluster, of their mean
_ROUNDS = 10
_SETTLED = 1e-3  # part of the nodes that still move when a phase ends


def propagate(indptr: np.ndarray, indices: np.ndarray, num_parts: int) -> np.ndarray:
    """Between 0.95 ``num_parts`` and ``num_parts`` clusters, none above 1.1 times their mean -> int32 [V].

    1. Every node starts as a cluster and moves, in random order, to the cluster that most of its edges lead to and that
       has room; a few rounds.
    2. Whole clusters, small ones first, join the one that most of their edges lead to, while there is room.
    3. What is left over beyond ``num_parts`` clusters, such as separate components, fills up others.
    4. Nodes move again, the clusters being allowed their final size.

    Where clusters of whole nodes cannot be that balanced, the largest is the mean rounded up.

    Args:
        indptr, indices: CSR rows of an undirected graph, as of ``Graph``.
    """
    num_nodes = len(indptr) - 1
    fewest = math.ceil(_FEWEST * num_parts)
    label, size = np.arange(num_nodes, dtype=np.int32), np.ones(num_nodes, np.int64)
    rng = np.random.default_rng(0)
    room = num_nodes // fewest
    _settle(indptr, indices, label, size, room, num_nodes, rng)
    merged = 1
    while merged:
        label, size = _renumber(label)
        members = np.argsort(label, kind="stable")
        starts = np.concatenate([[0], np.cumsum(size)])
        merged = _merge(indptr, indices, np.argsort(size, kind="stable"), starts, members, label, size, room)
    label, size = _renumber(label)
    room = max(int(_LARGEST * num_nodes / min(num_parts, len(size))), math.ceil(num_nodes / num_parts))
    if len(size) > num_parts:
        by_size = np.argsort(-size, kind="stable")
        rank = np.empty(len(size), np.int32)
        rank[by_size] = np.arange(len(size))
        label, size = rank[label], size[by_size]
        members = np.argsort(label, kind="stable")
        _fill(indptr, indices, np.concatenate([[0], np.cumsum(size)]), members, label, size, num_parts, room)
        size = size[:num_parts]
    _settle(indptr, indices, label, size, room, max(len(size) - fewest, 0), rng)
    return _renumber(label)[0]


def _renumber(label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Labels without gaps, int32, and the size of each."""
    _, label, size = np.unique(label, return_inverse=True, return_counts=True)
    return label.astype(np.int32), size


def _settle(
    indptr: np.ndarray,
    indices: np.ndarray,
    label: np.ndarray,
    size: np.ndarray,
    room: int,
    spare: int,
    rng: np.random.Generator,
) -> None:
    for _ in range(_ROUNDS):
        moved, spare = move_nodes(indptr, indices, rng.permutation(len(label)), label, size, room, spare)
        if moved <= _SETTLED * len(label):
            return


@jit()
def move_nodes(indptr, indices, order, label, size, room, spare):  # type: ignore[no-untyped-def]
    """Nodes in ``order`` move to the cluster that most of their edges lead to and that has fewer than ``room`` members.

    A tie is for the node's own cluster, then for the first neighbour's. At most ``spare`` clusters are left empty.
    Changes ``label`` [V] and ``size`` [clusters]; returns how many nodes moved, and what is left of ``spare``.
    """
    count = np.zeros(len(size), np.int64)
    moved = 0
    for v in order:
        own = label[v]
        if size[own] == 1 and spare == 0:
            continue
        neighbors = indices[indptr[v] : indptr[v + 1]]
        for u in neighbors:
            count[label[u]] += 1
        best, most = own, count[own]
        for u in neighbors:
            c = label[u]
            if count[c] > most and size[c] < room:
                best, most = c, count[c]
        for u in neighbors:
            count[label[u]] = 0
        if best != own:
            spare -= size[own] == 1
            label[v] = best
            size[own] -= 1
            size[best] += 1
            moved += 1
    return moved, spare


@jit()
def _edges_to(indptr, indices, nodes, label, count, touched):  # type: ignore[no-untyped-def]
    """``count`` of the edges of ``nodes`` to every cluster; those with any go to ``touched``; their number."""
    found = 0
    for v in nodes:
        for u in indices[indptr[v] : indptr[v + 1]]:
            c = label[u]
            if count[c] == 0:
                touched[found] = c
                found += 1
            count[c] += 1
    return found


@jit()
def _merge(indptr, indices, order, starts, members, label, size, room):  # type: ignore[no-untyped-def]
    """Clusters in ``order`` join the one that most of their edges lead to, and that has room; how many did."""
    count, touched = np.zeros(len(size), np.int64), np.empty(len(size), np.int32)
    merged = 0
    for g in order:
        nodes = members[starts[g] : starts[g + 1]]
        if size[g] != len(nodes):  # another one has joined it
            continue
        found = _edges_to(indptr, indices, nodes, label, count, touched)
        best, most = g, 0
        for c in touched[:found]:
            if c != g and count[c] > most and size[c] + len(nodes) <= room:
                best, most = c, count[c]
            count[c] = 0
        if best != g:
            label[nodes] = best
            size[best] += len(nodes)
            size[g] = 0
            merged += 1
    return merged


@jit()
def _fill(indptr, indices, starts, members, label, size, num_parts, room):  # type: ignore[no-untyped-def]
    """Clusters from ``num_parts`` on go where most of their edges lead, or to the smallest, in parts if need be."""
    count, touched = np.zeros(len(size), np.int64), np.empty(len(size), np.int32)
    by_size = [(size[c], c) for c in range(num_parts)]
    heapq.heapify(by_size)
    for g in range(num_parts, len(size)):
        nodes = members[starts[g] : starts[g + 1]]
        found = _edges_to(indptr, indices, nodes, label, count, touched)
        best, most = -1, 0
        for c in touched[:found]:
            if c < num_parts and count[c] > most and size[c] + len(nodes) <= room:
                best, most = c, count[c]
            count[c] = 0
        done = 0
        while done < len(nodes):
            if best < 0:
                listed, best = heapq.heappop(by_size)
                if listed != size[best]:  # it has grown since
                    heapq.heappush(by_size, (size[best], best))
                    best = -1
                    continue
                heapq.heappush(by_size, (size[best], best))
            part = nodes[done : done + room - size[best]]
            label[part] = best
            size[best] += len(part)
            done += len(part)
            best = -1
        size[g] = 0
