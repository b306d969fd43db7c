"""Batches: whom a sequence holds, and how an epoch is cut into them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import psutil
import pytest
import torch

from megagraph.attention.fields import MASKED_BUCKET, MAX_CHANNELS
from megagraph.attention.layout import NodeLayout
from megagraph.data.batch import Batch, Share
from megagraph.data.cluster import ClusterBatches
from megagraph.data.datasets import synthetic_graph
from megagraph.data.ego import EgoBatches
from megagraph.data.graph import random_split
from megagraph.data.loader import Loader
from megagraph.data.options import MOST_BUCKETS, MOST_CHANNELS, BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.start import bias_labels, bias_start
from tests.data.graphs import make_graph


def prepared(graph, *, cluster_size=None, **options):
    return prepare(graph, BatchOptions(**options), cluster_size=cluster_size)


@pytest.fixture(scope="module")
def graph():
    """Some isolated nodes, so that ego sequences have padding."""
    return synthetic_graph(num_nodes=400, average_degree=3, seed=0)


@pytest.fixture(scope="module", params=["projected", "bucket"])
def ego(request, graph):
    return prepared(graph, bias=request.param, sample_nodes=6, samples=3, global_tokens=2, channels=4, max_distance=3)


@pytest.fixture(scope="module", params=["projected", "bucket"])
def cluster(request, graph):
    return prepared(
        graph, batching="cluster", bias=request.param, sequence_nodes=128, cluster_size=30, super_nodes=10, channels=4
    )


def form_of(batch):
    return "bucket" if batch.structure.ndim == 3 else "projected"


def check_shapes(batch, B, N, T, G, bias):
    assert (batch.batch_size, batch.num_nodes, batch.layout.num_columns, batch.layout.num_local) == (B, N, N, N)
    assert batch.node_index.shape == (B, N - G) and batch.node_index.max() < len(batch.features)
    assert batch.labels.shape == batch.target_nodes.shape == (B, T)
    assert batch.sequence_ids.tolist() == list(range(B))
    assert batch.num_targets == (batch.labels >= 0).sum()
    if bias == "projected":
        assert batch.structure.shape == (B, 4 + G + (T > 1), N, N) and batch.structure.dtype == torch.float32
    else:
        assert batch.structure.shape == (B, N, N) and batch.structure.dtype == torch.uint8
        masked = batch.key_padding_mask[:, :, None] | batch.key_padding_mask[:, None]
        assert ((batch.structure == 255) == masked).all()


KINDS = [("ego", "projected"), ("ego", "bucket"), ("cluster", "projected"), ("cluster", "bucket"), ("full", "bucket")]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_read_is_known(graph, kind):
    """Options that batches of one kind alone read are known, by looking who is asked for what."""
    read = set()

    class Traced(BatchOptions):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    changed = dict(samples=2, sample_nodes=9, candidates=99, epsilon=1e-3, super_ratio=0.2, sequence_nodes=256)
    changed |= dict(hops=2, top=4, max_pairs=10**7, channels=3, power_scope="batch", power_gib=1.0, max_distance=3)
    options = Traced(batching=kind[0], bias=kind[1], **changed)
    unread = options.unread
    read.clear()
    bias_start(prepare(graph, options))
    bias_labels(options)
    assert sorted(unread) == sorted({*changed} - read)
    assert BatchOptions(batching=kind[0], bias=kind[1]).unread == []


def test_ego_batch(graph, ego):
    targets = np.array([5, 0, 399])
    mask = np.arange(400) != 0
    batch = ego.build(targets, mask, np.random.default_rng(0))
    bias = form_of(batch)
    check_shapes(batch, B=9, N=10, T=1, G=2, bias=bias)
    assert ego.sequence_nodes == 10 and batch.layout == NodeLayout(7, 3)
    assert batch.target_nodes[:, 0].tolist() == np.repeat(targets, 3).tolist()
    labels = graph.labels[targets] * mask[targets] - ~mask[targets]
    assert batch.labels[:, 0].tolist() == np.repeat(labels, 3).tolist()
    assert batch.num_targets == 6
    rows = batch.features[batch.node_index].numpy()
    np.testing.assert_array_equal(rows[:, 0], graph.features[np.repeat(targets, 3)])
    supers = ego.coarsening.membership[np.repeat(targets, 3)]
    np.testing.assert_array_equal(rows[:, -1], ego.coarsening.features[supers])
    assert len(np.unique(batch.features.numpy(), axis=0)) == len(batch.features)
    row_ids = batch.node_ids[batch.node_index].numpy()
    assert (row_ids[:, 0] == np.repeat(targets, 3)).all() and (row_ids[:, -1] == 400 + supers).all()
    degrees, membership = np.diff(graph.indptr), ego.coarsening.membership
    rows = batch.degrees[batch.node_index].numpy()
    np.testing.assert_array_equal(rows[:, 0], degrees[np.repeat(targets, 3)])
    np.testing.assert_array_equal(rows[:, -1], [round(degrees[membership == part].mean()) for part in supers])


@pytest.mark.parametrize("batching", ["ego", "cluster", "full"])
def test_several_labels_of_a_node(graph, batching):
    """Those of the nodes that count, -1 for others and where they are not known."""
    labels = np.random.default_rng(0).integers(-1, 2, (400, 5), np.int8)
    several = replace(graph, labels=labels, num_classes=5)
    builder = prepared(several, batching=batching, bias="bucket", sequence_nodes=128, samples=2, super_nodes=10)
    counted = np.arange(1, 400, 2)
    found = dict.fromkeys(range(2), 0)
    for half in found:
        share = Share(dp_rank=half, dp=2, num_microbatches=1) if batching != "full" else Share(cp_rank=half, cp=2)
        for batch in Loader(builder, counted, batch_size=3, seed=0, shuffle=True, share=share).epoch(0):
            assert batch.labels.dtype == torch.int8 and batch.labels.shape == (*batch.target_nodes.shape, 5)
            node = batch.target_nodes.numpy()
            expected = np.where((node % 2 == 1)[..., None], labels[node], -1)
            np.testing.assert_array_equal(batch.labels, np.where((node < 0)[..., None], -1, expected))
            found[half] += int((batch.labels >= 0).sum())
    samples = 2 if batching == "ego" else 1
    loader = Loader(builder, counted, batch_size=3, seed=0, shuffle=True)
    assert sum(batch.num_targets for batch in loader.epoch(0)) == samples * (labels[counted] >= 0).sum()
    assert sum(found.values()) == samples * (labels[counted] >= 0).sum() and min(found.values()) > 0


def test_a_target_without_neighbours_is_padded(graph, ego):
    isolated = np.flatnonzero(np.diff(graph.indptr) == 0)[:1]
    batch = ego.build(isolated, np.ones(400, bool), np.random.default_rng(0))
    assert batch.key_padding_mask.tolist() == [[False] + 6 * [True] + 3 * [False]] * 3
    assert (batch.node_index[:, 1:7] == 0).all()
    if form_of(batch) == "projected":
        assert not batch.structure[:, :, 1:7].any() and not batch.structure[:, :, :, 1:7].any()


def test_ego_plan_covers_the_nodes(ego):
    nodes = np.arange(0, 400, 3)
    assert np.concatenate(ego.plan(nodes, 32, None)).tolist() == nodes.tolist()
    shuffled = np.concatenate(ego.plan(nodes, 32, np.random.default_rng(0)))
    assert shuffled.tolist() != nodes.tolist() and sorted(shuffled) == nodes.tolist()


def test_every_node_is_in_one_sequence_of_an_epoch(graph, cluster):
    nodes = np.flatnonzero(graph.labels == 2)
    orders = []
    for epoch in (0, 1):
        batches = list(Loader(cluster, nodes, batch_size=2, seed=0, shuffle=True).epoch(epoch))
        for batch in batches:
            bias = form_of(batch)
            check_shapes(batch, B=batch.batch_size, N=cluster.sequence_nodes, T=128, G=1, bias=bias)
            assert (batch.key_padding_mask[:, :128] == (batch.target_nodes < 0)).all()
            counted = batch.target_nodes[batch.labels >= 0]
            assert set(counted.tolist()) <= set(nodes.tolist())
            real = batch.target_nodes >= 0
            rows = batch.features[batch.node_index]
            np.testing.assert_array_equal(rows[:, :128][real], graph.features[batch.target_nodes[real]])
        ids = torch.cat([batch.target_nodes.flatten() for batch in batches])
        assert sorted(ids[ids >= 0].tolist()) == list(range(400))
        assert sum(batch.num_targets for batch in batches) == len(nodes)
        orders.append(ids.tolist())
    assert orders[0] != orders[1]


def test_super_nodes_stand_for_what_is_outside_of_the_sequence(graph, cluster):
    membership = cluster.coarsening.membership
    part = np.flatnonzero(membership == 3)
    sequences = np.full((3, 128), -1)
    sequences[0, : len(part)] = part  # all of a super node
    sequences[1, :100] = np.random.default_rng(0).permutation(400)[:100]
    batch = cluster.build(sequences, np.ones(400, bool), np.random.default_rng(0))
    rows, degrees = batch.features[batch.node_index], batch.degrees[batch.node_index]
    for b, sequence in enumerate(sequences):
        for s in range(cluster.coarsening.num_parts):
            outside = np.setdiff1d(np.flatnonzero(membership == s), sequence)
            assert batch.key_padding_mask[b, 128 + s] == (len(outside) == 0)
            if len(outside):
                expected = graph.features[outside].astype(np.float64).mean(axis=0)
                np.testing.assert_allclose(rows[b, 128 + s], expected, rtol=1e-5, atol=1e-6)
                assert degrees[b, 128 + s] == round(np.diff(graph.indptr)[outside].mean())
    assert batch.key_padding_mask[:, 128:].nonzero().tolist() == [[0, 3]]


def test_super_nodes_of_an_ego_sequence_are_the_strongest(graph):
    builder = prepared(graph, sample_nodes=6, samples=2, super_nodes=5, global_tokens=2, channels=4)
    targets = np.arange(0, 400, 7)
    batch = builder.build(targets, np.ones(400, bool), np.random.default_rng(0))
    assert builder.sequence_nodes == batch.num_nodes == 12
    coarse = builder.coarsening.adjacency.toarray()
    for b, target in enumerate(np.repeat(targets, 2)):
        own = builder.coarsening.membership[target]
        row = np.where(np.arange(len(coarse)) == own, 2, coarse[own])
        strongest = np.argsort(-row, kind="stable")[: min(3, (row > 0).sum())]
        assert batch.key_padding_mask[b, 7:].tolist() == [i >= len(strongest) for i in range(3)] + [False] * 2
        got = batch.features[batch.node_index[b, 7 : 7 + len(strongest)]]
        np.testing.assert_array_equal(got, builder.coarsening.features[strongest])
    assert batch.key_padding_mask[:, 7:].any()


def kept_edges(graph, sequences):
    """Share of the edges with both ends in one sequence."""
    sequence_of = np.empty(graph.num_nodes, np.int64)
    for i, nodes in enumerate(sequences):
        sequence_of[nodes[nodes >= 0]] = i
    rows = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr))
    return (sequence_of[rows] == sequence_of[graph.indices]).mean()


def test_neighbouring_clusters_are_drawn_together():
    ring = make_graph(2048, [(i, (i + 1) % 2048) for i in range(2048)])
    builder, kept = prepared(ring, batching="cluster", sequence_nodes=128, cluster_size=16, super_nodes=4), []
    for together in (0.0, 0.5, 1.0):
        builder.together = together
        sequences = np.concatenate(builder.plan(np.arange(2048), 1, np.random.default_rng(0)))
        assert sorted(sequences[sequences >= 0]) == list(range(2048))
        kept.append(kept_edges(ring, sequences))
    assert kept[0] + 0.01 < kept[1] < kept[2] - 0.005 and kept[2] > 0.98


def test_whole_clusters_are_packed_and_long_ones_cut(graph):
    builder = prepared(graph, batching="cluster", sequence_nodes=128, cluster_size=200, super_nodes=4)
    (sequences,) = builder.plan(np.arange(400), 100, None)
    assert sequences.shape[1] == 128 and sorted(sequences[sequences >= 0]) == list(range(400))
    small = prepared(graph, batching="cluster", sequence_nodes=1024, super_nodes=4)
    assert small.num_regular == 400 and small.sequence_nodes == 404
    (sequences,) = small.plan(np.arange(400), 100, None)
    assert sorted(sequences[0]) == list(range(400))


@pytest.mark.parametrize("rng", [None, 0, 1])
def test_clusters_without_inner_edges_are_in_one_sequence_each(rng, monkeypatch):
    """Leaves of a star know its middle alone."""
    monkeypatch.setattr(ClusterBatches, "together", 0.9)
    star = make_graph(300, [(0, i) for i in range(1, 300)])
    builder = prepared(star, batching="cluster", sequence_nodes=128, cluster_size=32, super_nodes=4)
    sequences = np.concatenate(builder.plan(np.arange(300), 100, None if rng is None else np.random.default_rng(rng)))
    assert sorted(sequences[sequences >= 0]) == list(range(300))


@pytest.mark.parametrize("batching", ["ego", "cluster"])
def test_bf16_channels_are_rounded_fp32_ones(graph, batching):
    options = dict(batching=batching, bias="projected", sample_nodes=6, sequence_nodes=128, super_nodes=8, channels=4)
    targets = np.arange(128)[None] if batching == "cluster" else np.array([5, 0])
    exact, rounded = (
        prepared(graph, **options, channel_dtype=name).build(targets, np.ones(400, bool), np.random.default_rng(0))
        for name in ("fp32", "bf16")
    )
    assert rounded.structure.dtype == torch.bfloat16 and rounded.structure.stride(-2) % 16 == 0
    assert torch.equal(rounded.structure, exact.structure.bfloat16())
    assert 2 * rounded.structure.untyped_storage().nbytes() == exact.structure.untyped_storage().nbytes()
    assert torch.equal(rounded.features, exact.features)


def test_a_batch_moves_with_its_rows_aligned(ego):
    batch = ego.build(np.array([1]), np.ones(400, bool), np.random.default_rng(0))
    for moved in (batch.to("cpu"), batch.to("meta")):
        assert moved.structure.stride() == batch.structure.stride()
        assert moved.structure.stride(-2) % 16 == 0


def test_to_and_slots_keep_every_field(ego):
    batch = ego.build(np.array([1]), np.ones(400, bool), np.random.default_rng(0))
    moved = batch.to("meta", non_blocking=True)
    for field in fields(Batch):
        before, after = getattr(batch, field.name), getattr(moved, field.name)
        assert after.is_meta and after.shape == before.shape if isinstance(before, torch.Tensor) else after == before


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batching", ["ego", "cluster"])
def test_batches_depend_on_seed_and_epoch_only(graph, batching, num_workers):
    builder = prepared(graph, batching=batching, sample_nodes=4, samples=2, sequence_nodes=128, super_nodes=8)
    train = random_split(graph.labels, 0).train

    batch_size = 64 if batching == "ego" else 1

    def digest(seed, epoch, num_workers=0, start=0):
        loader = Loader(builder, train, batch_size=batch_size, seed=seed, shuffle=True, num_workers=num_workers)
        if num_workers:
            list(loader.epoch(epoch + 1))  # workers that have served another epoch
        batches = list(loader.epoch(epoch, start))
        assert len(loader.epoch(epoch, start)) == len(batches)
        return [(b.target_nodes.tolist(), b.node_index.tolist(), float(b.features.sum())) for b in batches]

    before = torch.get_rng_state()
    expected = digest(0, 1)
    assert digest(0, 1, num_workers) == expected
    assert digest(1, 1) != expected and digest(0, 2) != expected
    for start in (1, len(expected) - 1, len(expected)):
        assert digest(0, 1, num_workers, start) == expected[start:]
    assert (torch.get_rng_state() == before).all()


def test_workers_start_with_their_loader(graph):
    """Later there are threads beside which a fork may deadlock."""
    before = set(psutil.Process().children())
    loader = Loader(prepared(graph, sample_nodes=4), np.arange(40), batch_size=8, seed=0, shuffle=True, num_workers=2)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    for epoch in range(2):
        assert sum(1 for _ in loader.epoch(epoch)) == 5
    assert set(psutil.Process().children()) - before == workers


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("dp", [1, 2, 3])
def test_every_node_is_on_one_rank_in_every_epoch(graph, dp, num_workers):
    builder = prepared(graph, batching="cluster", bias="bucket", sequence_nodes=128, super_nodes=8)
    options = {"batch_size": 3, "seed": 0, "shuffle": True, "num_workers": num_workers}
    ranks = [Loader(builder, np.arange(400), share=Share(dp_rank=rank, dp=dp), **options) for rank in range(dp)]
    for epoch in (0, 1):
        ids = torch.cat([batch.target_nodes.flatten() for loader in ranks for batch in loader.epoch(epoch)])
        assert sorted(ids[ids >= 0].tolist()) == list(range(400))


@pytest.mark.parametrize("batching", ["ego", "cluster"])
def test_batches_ahead_are_bounded_in_bytes(graph, batching, monkeypatch):
    builder = prepared(graph, batching=batching, sample_nodes=4, samples=2, sequence_nodes=128, super_nodes=8)
    options = {"nodes": np.arange(400), "batch_size": 2, "seed": 0, "shuffle": True}
    share = Share(cp=2, num_microbatches=2)
    most = builder.num_bytes(2, share)
    for batch in Loader(builder, **options, share=share).epoch(0):
        tensors = [getattr(batch, field.name) for field in fields(Batch)]
        held = sum(x.untyped_storage().nbytes() for x in tensors if isinstance(x, torch.Tensor))
        assert 0.5 * most < held <= most
    for batches, workers, ahead in ((0, 1, 1), (3, 2, 1), (5, 2, 2), (100, 2, 4)):
        monkeypatch.setattr("megagraph.data.loader.PREFETCH_BYTES", batches * most)
        loader = Loader(builder, **options, share=share, num_workers=2)._loader
        assert (loader.num_workers, loader.prefetch_factor) == (workers, ahead)


def test_channels_that_are_too_large_are_refused_before_the_first_batch(graph, monkeypatch):
    builder = prepared(graph, samples=1)
    monkeypatch.setattr("megagraph.data.structure.MAX_CHANNEL_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"the 7 channels of 3 x 17 x 17 node pairs take .* limit of 10,000"):
        Loader(builder, np.arange(9), batch_size=3, seed=0, shuffle=True)


@pytest.mark.parametrize("batching", ["ego", "cluster"])
def test_batches_that_ask_for_more_than_there_is(graph, batching):
    """Their bytes are those of batches that the graph can fill."""
    chosen = dict(batching=batching, samples=2, sequence_nodes=128, sample_nodes=1000, super_nodes=8)
    builder = prepared(graph, **chosen)
    loader = Loader(builder, np.arange(3), batch_size=10**9, seed=0, shuffle=True)
    (batch,) = loader.epoch(0)
    assert len(batch.target_nodes) <= (2 if batching == "ego" else 1) * builder.most(np.arange(3))
    assert builder.num_regular == (400 if batching == "ego" else 128)
    if batching == "ego":
        own = batch.target_nodes[:, 0]
        assert sorted(own.tolist()) == [0, 0, 1, 1, 2, 2] and batch.key_padding_mask.shape == (6, 408)


def test_evaluation_keeps_the_order_of_nodes(graph):
    loader = Loader(prepared(graph, samples=1), np.array([9, 3, 5]), batch_size=2, seed=0, shuffle=False)
    assert [batch.target_nodes[:, 0].tolist() for batch in loader.epoch(0)] == [[9, 3], [5]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batching": "random"}, "batching must be ego or cluster or full, got 'random'"),
        ({"bias": "dense"}, "bias must be projected or bucket, got 'dense'"),
        ({"global_tokens": -1}, "global_tokens must be at least 0, got -1"),
        ({"sample_nodes": 0}, "sample_nodes must be at least 1, got 0"),
        ({"candidates": 13}, "candidates must be at least sample_nodes = 14, got 13"),
        ({"channels": 16}, "channels with one for each of 1 global_tokens must be at most 16, got 17; lower them"),
        ({"channels": 11, "global_tokens": 6, "super_nodes": 7}, "of 6 global_tokens must be at most 16, got 17"),
        (
            {"batching": "cluster", "channels": 15},
            "each of 1 global_tokens and one for the own super node must be at most 16, got 17",
        ),
        ({"bias": "bucket", "max_distance": 125}, "max_distance must be at most 124, got 125"),
        ({"epsilon": 0.0}, "epsilon must be above 0 and below 1, got 0.0"),
        ({"super_ratio": 0.0}, r"super_ratio must be in \(0, 1\], got 0\.0"),
        ({"batching": "cluster", "sequence_nodes": 100}, "sequence_nodes must be a multiple of 128, got 100"),
        ({"batching": "cluster", "cluster_size": 0}, "expected cluster_size >= 1, got 0"),
        ({"batching": "cluster", "super_nodes": 1}, "super_nodes must be above global_tokens = 1, got 1"),
        ({"super_nodes": 1}, "super_nodes must be above global_tokens = 1, got 1"),
    ],
)
def test_prepare_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        prepared(make_graph(20, [(i, i + 1) for i in range(19)]), **options)


def test_limits_are_those_of_attention():
    """Options are read without torch, and so have numbers of their own."""
    assert (MOST_CHANNELS, MOST_BUCKETS) == (MAX_CHANNELS, MASKED_BUCKET)


def test_an_epoch_resumes_without_building_what_came_before(graph, monkeypatch):
    loader = Loader(prepared(graph, samples=1), np.arange(10), batch_size=2, seed=0, shuffle=False)
    built = []
    build = EgoBatches.build
    monkeypatch.setattr(EgoBatches, "build", lambda *arguments: built.append(arguments[1]) or build(*arguments))
    assert len(list(loader.epoch(0, start=3))) == 2
    assert np.concatenate(built).tolist() == [6, 7, 8, 9]
    with pytest.raises(ValueError, match=r"expected start in 0\.\.5, the batches of an epoch, got 6"):
        loader.epoch(0, start=6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "expected batch_size >= 1, got 0"),
        ({"nodes": np.array([], np.int64)}, "expected node ids to load, got none; check the split"),
        ({"nodes": np.array([0, 400])}, r"expected node ids in 0\.\.399, got 0\.\.400"),
    ],
)
def test_loader_refuses(graph, changes, message):
    options = {"nodes": np.arange(3), "batch_size": 2, "seed": 0, "shuffle": True} | changes
    with pytest.raises(ValueError, match=message):
        Loader(prepared(graph, samples=1), **options)


def test_both_kinds_are_what_prepare_returns(ego, cluster):
    assert isinstance(ego, EgoBatches) and isinstance(cluster, ClusterBatches)
