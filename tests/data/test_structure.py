import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from megagraph.attention.layout import NodeLayout
from megagraph.data import power_loops, structure
from megagraph.data.coarsen import coarsen, normalized_adjacency, partition
from megagraph.data.datasets import load_graph, synthetic_graph
from megagraph.data.options import num_buckets
from megagraph.data.structure import (
    AdjacencyPowers,
    BiasChannels,
    DistanceBuckets,
    InducedSubgraph,
    hop_distances,
)
from tests.data.graphs import dense_hops, dense_normalized, make_graph, random_graphs

POWERS = 4
GLOBAL = 2


@st.composite
def sequences(draw, max_super=2):
    """A graph, its coarsening, and two sequences of distinct nodes padded at their ends."""
    graph = draw(random_graphs())
    # any parts, not METIS's: it would start a process for every example
    parts = draw(arrays(np.int32, graph.num_nodes, elements=st.integers(0, 2)))
    coarsening = coarsen(graph, np.unique(parts, return_inverse=True)[1].astype(np.int32))
    n = draw(st.integers(1, graph.num_nodes))
    regular = np.full((2, n + 1), -1)
    for row in regular:
        length = draw(st.integers(1, n))
        row[:length] = draw(st.permutations(range(graph.num_nodes)))[:length]
    s = draw(st.integers(0, min(max_super, coarsening.num_parts)))
    supers = np.stack([draw(st.permutations(range(coarsening.num_parts)))[:s] for _ in regular]).astype(np.int64)
    supers = supers.reshape(2, s)
    supers[draw(arrays(bool, supers.shape))] = -1  # without members outside
    return graph, coarsening, regular, supers


def layouts_of(regular, supers, world_size):
    return [NodeLayout(regular.shape[1], supers.shape[1] + GLOBAL, rank, world_size) for rank in range(world_size)]


def rows_of(full, layout, padding):
    """A rank's rows of [..., N, N]; the padding of the layout is ``padding``."""
    rows = layout.local_to_global.numpy()
    local = full[..., rows, :]
    local[..., rows < 0, :] = padding
    return local


def dense_powers(matrix):
    return [np.linalg.matrix_power(matrix, power + 1) for power in range(POWERS)]


def expected_channels(graph, coarsening, regular, supers, scope):
    """One sequence, by loops over its pairs."""
    n, s = len(regular), len(supers)
    size = n + s + GLOBAL
    normal = dense_normalized(graph.adjacency)
    coarse = coarsening.adjacency.toarray().astype(np.float64)
    super_of = [coarsening.membership[node] if node >= 0 else -1 for node in regular] + list(supers)
    if scope == "batch":
        inside = np.isin(np.arange(len(normal)), regular)
        normal = normal * inside[:, None] * inside
        inside = np.isin(np.arange(len(coarse)), super_of)
        coarse = coarse * inside[:, None] * inside
    channels = np.zeros((POWERS + GLOBAL + 1, size, size))
    for c, (power, coarse_power) in enumerate(zip(dense_powers(normal), dense_powers(coarse), strict=True)):
        for i in range(n + s):
            for j in range(n + s):
                if super_of[i] < 0 or super_of[j] < 0:
                    continue
                both_regular = i < n and j < n
                channels[c, i, j] = (
                    power[regular[i], regular[j]] if both_regular else coarse_power[super_of[i], super_of[j]]
                )
    for g in range(GLOBAL):
        channels[POWERS + g, n + s + g] = channels[POWERS + g, :, n + s + g] = 1
    for i in range(n):
        for j in range(n, n + s):
            channels[-1, i, j] = channels[-1, j, i] = super_of[i] == super_of[j]
    padding = np.flatnonzero(np.concatenate([regular, supers]) < 0)
    channels[:, padding] = channels[:, :, padding] = 0
    return channels


@pytest.mark.parametrize("scope", ["graph", "batch"])
@pytest.mark.parametrize("own_super", [False, True], ids=["ansgt", "own"])
@settings(max_examples=60)
@given(sequences(), st.sampled_from([1, 2, 3, 5]))
def test_channels_are_the_definition(scope, own_super, problem, cp):
    graph, coarsening, regular, supers = problem
    channels = BiasChannels(
        graph, coarsening, num_powers=POWERS, global_tokens=GLOBAL, scope=scope, own_super=own_super
    )
    assert channels.size == POWERS + GLOBAL + own_super
    nodes = zip(regular, supers, strict=True)
    expected = np.stack([expected_channels(graph, coarsening, *sequence, scope) for sequence in nodes])
    for layout in layouts_of(regular, supers, cp):
        got = channels.build(regular, supers, layout)
        assert got.dtype == torch.float32 and got.stride(-2) % 16 == 0
        np.testing.assert_allclose(got, rows_of(expected[:, : channels.size], layout, 0), atol=1e-6)


def expected_buckets(graph, coarsening, regular, supers, max_distance):
    n, s = len(regular), len(supers)
    size = n + s + GLOBAL
    levels = max_distance + 2
    real = regular >= 0
    buckets = np.full((size, size), 2 * levels + 1)
    local = dense_hops(graph.adjacency.toarray()[np.ix_(regular[real], regular[real])], max_distance)
    buckets[np.ix_(np.flatnonzero(real), np.flatnonzero(real))] = local
    coarse = levels + dense_hops(coarsening.adjacency.toarray(), max_distance)
    super_of = np.concatenate([coarsening.membership[regular], supers])
    buckets[n : n + s, : n + s] = coarse[np.ix_(supers, super_of)]
    buckets[: n + s, n : n + s] = coarse[np.ix_(super_of, supers)]
    for i in range(n):
        for j in range(s):
            if super_of[i] == supers[j]:
                buckets[i, n + j] = buckets[n + j, i] = 2 * levels
    padding = np.flatnonzero(np.concatenate([regular, supers]) < 0)
    buckets[padding] = buckets[:, padding] = 255
    return buckets


@pytest.mark.parametrize("max_distance", [1, 3])
@settings(max_examples=60)
@given(sequences(), st.sampled_from([1, 2, 3, 5]))
def test_buckets_are_hop_distances(max_distance, problem, cp):
    graph, coarsening, regular, supers = problem
    buckets = DistanceBuckets(graph, coarsening, max_distance=max_distance, global_tokens=GLOBAL)
    assert buckets.size == num_buckets(max_distance)
    nodes = zip(regular, supers, strict=True)
    expected = np.stack([expected_buckets(graph, coarsening, *sequence, max_distance) for sequence in nodes])
    for layout in layouts_of(regular, supers, cp):
        got = buckets.build(regular, supers, layout)
        assert got.dtype == torch.uint8 and got.stride(-2) % 16 == 0
        np.testing.assert_array_equal(got, rows_of(expected, layout, 255))


@given(random_graphs(), st.integers(0, 99))
def test_induced_edges_are_those_among_the_nodes(graph, seed):
    rng = np.random.default_rng(seed)
    nodes = np.stack([rng.permutation(graph.num_nodes)[: graph.num_nodes // 2 + 1] for _ in range(3)])
    nodes[rng.random(nodes.shape) < 0.2] = -1
    starts, columns, edges = InducedSubgraph(graph.indptr, graph.indices)(nodes)
    n = nodes.shape[1]
    got = sp.csr_array((np.ones(len(columns)), columns, starts), shape=(nodes.size, n)).toarray()
    adjacency = np.pad(graph.adjacency.toarray(), (0, 1))  # -1 is a node without edges
    np.testing.assert_array_equal(got.reshape(3, n, n), [adjacency[np.ix_(row, row)] for row in nodes])
    row = np.repeat(np.arange(nodes.size), np.diff(starts))
    assert (graph.indices[edges] == nodes[row // n, columns]).all()


def test_a_hub_is_searched_like_any_node():
    star = make_graph(500, [(0, i) for i in range(1, 500, 2)])
    nodes = np.array([[4, 3, 0, 7], [0, -1, 8, 499]])
    starts, columns, _ = InducedSubgraph(star.indptr, star.indices)(nodes)
    assert columns.tolist() == [2, 1, 3, 2, 3, 0] and starts.tolist() == [0, 0, 1, 3, 4, 5, 5, 5, 6]


@pytest.mark.parametrize("sources", [range(150), range(20, 120), range(7, 7)], ids=["all", "some", "none"])
def test_hops_over_more_sources_than_a_word_has_bits(sources):
    graph = synthetic_graph(num_nodes=300, average_degree=2, seed=0)
    nodes = np.random.default_rng(0).permutation(300).reshape(2, 150)
    starts, columns, _ = InducedSubgraph(graph.indptr, graph.indices)(nodes)
    got = np.empty((2, len(sources), 150), np.uint8)
    hop_distances(starts, columns, 5, sources, got)
    for b, sequence in enumerate(nodes):
        expected = dense_hops(graph.adjacency.toarray()[np.ix_(sequence, sequence)], 5)
        np.testing.assert_array_equal(got[b], expected[sources])


@pytest.fixture(scope="module", params=["graph", "batch", "bucket"])
def long_sequence(request):
    """A form of the bias, and one sequence that is long enough for the rows to dominate its cost."""
    graph = synthetic_graph(num_nodes=2048, average_degree=4, seed=0)
    coarsening = coarsen(graph, partition(graph, 8))
    if request.param == "bucket":
        form = DistanceBuckets(graph, coarsening, max_distance=4, global_tokens=GLOBAL)
    else:
        form = BiasChannels(graph, coarsening, num_powers=2, global_tokens=GLOBAL, scope=request.param)
    return form, np.arange(2048)[None], np.arange(8)[None]


def test_a_rank_makes_room_for_its_own_rows_only(long_sequence):
    form, *nodes = long_sequence
    peak_bytes = []
    for world_size in (1, 16):
        layout = layouts_of(*nodes, world_size)[-1]
        tracemalloc.start()
        form.build(*nodes, layout)
        peak_bytes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peak_bytes[1] < peak_bytes[0] / 4


def test_a_rank_looks_up_and_searches_from_its_own_rows_only(long_sequence, monkeypatch):
    form, *nodes = long_sequence
    layout = layouts_of(*nodes, 16)[3]
    pairs, sources = [], []
    look_up, search = power_loops.pair_powers, structure.hop_distances

    def counted_look_up(*arguments):
        pairs.append(arguments[-1].shape[2:])
        return look_up(*arguments)

    def counted_search(starts, columns, max_distance, from_nodes, out):
        sources.extend(from_nodes)
        return search(starts, columns, max_distance, from_nodes, out)

    monkeypatch.setattr(power_loops, "pair_powers", counted_look_up)
    monkeypatch.setattr(structure, "hop_distances", counted_search)
    form.build(*nodes, layout)
    if isinstance(form, DistanceBuckets):
        assert sources == list(layout.block()) and not pairs
    else:
        assert pairs == ([(128, 2048), (8, 2048 + 8)] if form.powers.scope == "graph" else [])


def test_auto_scope_follows_the_size_of_what_is_kept():
    graph = synthetic_graph(num_nodes=500, seed=0)
    normalized = normalized_adjacency(graph.adjacency)
    kept = (normalized @ normalized).nnz * 4 * 3  # of three powers two, with their columns
    for adjacency in (graph, normalized):
        powers = AdjacencyPowers(adjacency, 3, "auto", kept)
        assert (powers.scope, powers.bytes) == ("graph", kept)
        assert str(powers) == f"bias from powers 1 to 3 of the graph's adjacency, {kept / 2**20:.2f} MiB"
        for most in (kept - 1, kept // 5, 10):  # counted, estimated, less than the graph itself
            powers = AdjacencyPowers(adjacency, 3, "auto", most)
            assert powers.scope == "batch" and most < powers.bytes <= 1.5 * kept
            assert str(powers).endswith(" MiB, see --power-gib")
        with pytest.raises(ValueError, match=r"GiB, got 1 to 2, which take .* MiB for 3 channels; raise --power-gib"):
            AdjacencyPowers(adjacency, 3, "graph", kept - 1)


@pytest.mark.parametrize("num_powers", [1, 2, 5, 6, 7])
def test_powers_of_a_graph_are_exact(num_powers):
    graph = synthetic_graph(num_nodes=300, average_degree=3, seed=1)  # some nodes have no edge
    assert (np.diff(graph.indptr) == 0).any()
    dense = normalized_adjacency(graph.adjacency).toarray().astype(np.float64)
    rng = np.random.default_rng(num_powers)
    nodes = rng.integers(0, 300, (5, 40))
    nodes[:, 3:6], nodes[:, 30] = nodes[:, 20:23], nodes[:, 20]  # in several places
    nodes[rng.random(nodes.shape) < 0.1] = -1
    powers = AdjacencyPowers(graph, num_powers, "graph")
    for rows in (range(7, 33), range(4), range(38, 40)):
        got, own = powers(nodes, rows), nodes[:, rows, None]
        power = np.eye(300)
        for channel in range(num_powers):
            power = power @ dense
            want = power[own, nodes[:, None]]
            want[(own < 0) | (nodes[:, None] < 0)] = 0
            np.testing.assert_allclose(got[:, channel], want, atol=1e-6)


def test_powers_at_a_hub_lose_no_digits():
    """They are sums of 2,001 products, most of them small."""
    graph = make_graph(2001, [(0, leaf) for leaf in range(1, 2001)])
    got = AdjacencyPowers(graph, 6, "graph")(np.arange(3)[None], range(3))[0]
    dense = dense_normalized(graph.adjacency)
    power = np.eye(2001)[:, :3]
    for channel in got:
        power = dense @ power
        np.testing.assert_allclose(channel, power[:3].T, rtol=0, atol=5e-7)


def test_powers_of_a_real_graph_are_exact(data_root):
    graph = load_graph("pubmed", data_root)
    powers = AdjacencyPowers(graph, 6)
    assert powers.scope == "graph"
    matrix = normalized_adjacency(graph.adjacency).astype(np.float64)
    nodes = np.random.default_rng(0).integers(0, graph.num_nodes, (1, 64))
    for slot in range(1, 40):  # a walk, so that there are near nodes
        nodes[0, slot] = matrix.indices[matrix.indptr[nodes[0, slot - 1]]]
    got = powers(nodes, range(64))[0]
    power = np.zeros((graph.num_nodes, 64))
    power[nodes[0], np.arange(64)] = 1
    for channel in got:
        power = matrix @ power
        np.testing.assert_allclose(channel, power[nodes[0]].T, atol=1e-6)


def test_threads_share_the_sequences_of_a_batch(monkeypatch):
    graph = synthetic_graph(num_nodes=60, num_classes=2, in_features=1, seed=0)
    powers = AdjacencyPowers(graph, 3, "graph")
    nodes = np.random.default_rng(0).permuted(np.tile(np.arange(60), (7, 1)), axis=1)
    expected = powers(nodes, range(5, 40))
    assert len({sequence.tobytes() for sequence in expected}) == 7
    monkeypatch.setattr(structure, "_PAIRS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert np.array_equal(powers(nodes, range(5, 40)), expected)
    finally:
        torch.set_num_threads(before)


def test_channels_above_the_limit_are_refused(monkeypatch):
    graph = make_graph(6, [(0, 1)])
    channels = BiasChannels(graph, coarsen(graph, partition(graph, 2)), num_powers=2, global_tokens=1)
    regular, supers = np.arange(6)[None], np.array([[0]])
    (layout,) = [NodeLayout(6, 2)]
    monkeypatch.setattr(structure, "MAX_CHANNEL_BYTES", 1536)
    assert channels.build(regular, supers, layout).untyped_storage().nbytes() == 1536
    monkeypatch.setattr(structure, "MAX_CHANNEL_BYTES", 1535)
    message = r"the 3 channels of 1 x 8 x 8 node pairs take 1,536 bytes, .* 1,535; take bias 'bucket' \(128 bytes\)"
    with pytest.raises(ValueError, match=message):
        channels.build(regular, supers, layout)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (BiasChannels, {"num_powers": 0}, "expected at least one power of the adjacency, got 0"),
        (BiasChannels, {"num_powers": 2, "scope": "all"}, "expected scope 'auto', 'graph' or 'batch', got 'all'"),
    ],
)
def test_bad_options_are_refused(kind, options, message):
    graph = make_graph(6, [(0, 1)])
    with pytest.raises(ValueError, match=message):
        kind(graph, coarsen(graph, partition(graph, 2)), global_tokens=1, **options)


def test_too_many_super_nodes_for_buckets_are_refused(monkeypatch):
    monkeypatch.setattr(structure, "MAX_HOP_TABLE_NODES", 1)
    graph = make_graph(6, [(0, 1), (2, 3), (4, 5)])
    with pytest.raises(ValueError, match=r"expected at most 1 super nodes .*, got 2; lower super_ratio"):
        DistanceBuckets(graph, coarsen(graph, partition(graph, 2)), max_distance=2, global_tokens=1)
