import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagraph.data.coarsen import partition, quality
from megagraph.data.datasets import synthetic_graph
from megagraph.data.generate import generate
from megagraph.data.propagate import _fill, _merge, move_nodes, propagate
from megagraph.data.store import open_store
from tests.data.graphs import random_graphs


def plain_move_nodes(indptr, indices, order, label, size, room, spare):
    moved = 0
    for v in order:
        own = label[v]
        if size[own] == 1 and spare == 0:
            continue
        near = label[indices[indptr[v] : indptr[v + 1]]]
        edges = {c: int((near == c).sum()) for c in near.tolist()}  # in the order in which they are met
        most = max([edges.get(own, 0), *(number for c, number in edges.items() if size[c] < room)])
        if edges.get(own, 0) == most:
            continue
        spare -= size[own] == 1
        label[v] = next(c for c, number in edges.items() if number == most and size[c] < room)
        size[own] -= 1
        size[label[v]] += 1
        moved += 1
    return moved, spare


def plain_merge(indptr, indices, order, starts, members, label, size, room):
    merged = 0
    for g in order:
        nodes = members[starts[g] : starts[g + 1]]
        if size[g] != len(nodes):
            continue
        near = np.concatenate([label[indices[indptr[v] : indptr[v + 1]]] for v in nodes])
        edges = {c: int((near == c).sum()) for c in near.tolist() if c != g and size[c] + len(nodes) <= room}
        if edges:
            best = max(edges, key=edges.get)
            label[nodes] = best
            size[best] += len(nodes)
            size[g] = 0
            merged += 1
    return merged


@given(random_graphs(), st.integers(1, 14), st.integers(0, 4), st.integers(0, 2**16))
def test_compiled_passes_do_what_plain_ones_do(graph, room, spare, seed):
    nodes = graph.num_nodes
    rng = np.random.default_rng(seed)
    parts = np.unique(rng.integers(0, nodes, nodes), return_inverse=True)[1].astype(np.int32)
    size = np.bincount(parts)

    def run(function, order, *between, last):
        label, sizes = parts.copy(), size.copy()
        return (
            function(graph.indptr, graph.indices, order, *between, label, sizes, *last),
            label.tolist(),
            sizes.tolist(),
        )

    order = rng.permutation(nodes)
    moves = [run(function, order, last=(room, spare)) for function in (move_nodes, plain_move_nodes)]
    assert moves[0] == moves[1]
    assert np.bincount(moves[0][1], minlength=len(size)).tolist() == moves[0][2]

    order, starts = rng.permutation(len(size)), np.concatenate([[0], np.cumsum(size)])
    members = np.argsort(parts, kind="stable")
    merges = [run(function, order, starts, members, last=(room,)) for function in (_merge, plain_merge)]
    assert merges[0] == merges[1]


def test_leftovers_go_where_their_edges_lead_then_to_the_smallest_then_in_parts():
    """Clusters 0 and 1 of three nodes; 2 has an edge to 1, 3 has none, and 4 has room nowhere as a whole."""
    parts = np.array([0, 0, 0, 1, 1, 1, 2, 3, 4, 4], np.int32)
    indptr = np.zeros(11, np.int64)
    indptr[7:] = 1
    size, label = np.bincount(parts), parts.copy()
    _fill(indptr, np.array([4], np.int32), np.append(0, np.cumsum(size)), np.arange(10), label, size, 2, 5)
    assert label.tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0, 1] and size.tolist() == [5, 5, 0, 0, 0]


@given(random_graphs(max_nodes=40), st.integers(1, 40))
def test_counts_and_sizes_keep_their_bounds_on_any_graph(graph, num_parts):
    nodes = graph.num_nodes
    num_parts = min(num_parts, nodes)
    parts = propagate(graph.indptr, graph.indices, num_parts)
    size = np.bincount(parts)
    assert parts.dtype == np.int32 and len(parts) == nodes and size.min() > 0
    assert 0.95 * num_parts <= len(size) <= num_parts
    assert size.max() <= max(1.1 * nodes / len(size), -(-nodes // num_parts))
    assert (propagate(graph.indptr, graph.indices, num_parts) == parts).all()


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated") / "store"
    generate(folder, nodes=12_000, edges=300_000, features=2, classes=5)
    return open_store(folder)


def test_the_cut_is_close_to_that_of_metis(large):
    """The bound that holds on a graph of millions; ANS-GT's kind of graph, without blocks, is the harder case."""
    for graph, num_parts in ((large, 40), (synthetic_graph(num_nodes=4000, average_degree=12, seed=0), 20)):
        ours, theirs = (quality(graph, partition(graph, num_parts, method)) for method in ("propagation", "metis"))
        chance = quality(graph, np.random.default_rng(0).permutation(graph.num_nodes) % num_parts)
        assert ours.edge_cut < 1.15 * theirs.edge_cut < chance.edge_cut
        assert ours.balance <= 1.1 and 0.95 * num_parts <= ours.parts <= num_parts


def test_partitions_are_kept_beside_the_store(large, monkeypatch):
    parts = partition(large, 40, "propagation")
    kept = [path for path in (large.store / "cache").iterdir() if "propagation-40-" in path.name]
    monkeypatch.setattr("megagraph.data.propagate.propagate", lambda *_: pytest.fail("computed again"))
    assert len(kept) == 1 and (partition(large, 40, "propagation") == parts).all()
    monkeypatch.undo()
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    assert (partition(large, 40, "propagation") == parts).all() and (np.load(kept[0]) == parts).all()


def test_size_chooses_the_method(large, monkeypatch):
    called = []
    monkeypatch.setattr("megagraph.data.coarsen.metis", lambda *_: called.append("metis") or np.zeros(12_000, np.int32))
    monkeypatch.setattr("megagraph.data.propagate.propagate", lambda *_: called.append("ours") or np.zeros(12_000, int))
    partition(large, 7)
    monkeypatch.setattr("megagraph.data.coarsen._METIS_EDGES", large.num_edges - 1)
    partition(large, 7)
    assert called == ["metis", "ours"]
