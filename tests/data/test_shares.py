"""What a rank has of a batch: its sequences, rows, features and labels."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from megagraph.attention.layout import NodeLayout
from megagraph.data.batch import EMBEDDED, Batch, Share
from megagraph.data.datasets import synthetic_graph
from megagraph.data.ego import EgoBatches
from megagraph.data.loader import Loader
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.sample import Pagerank


def prepared(graph, *, cluster_size=None, **options):
    return prepare(graph, BatchOptions(**options), cluster_size=cluster_size)


@pytest.fixture(scope="module")
def graph():
    """Some isolated nodes, so that ego sequences have padding."""
    return synthetic_graph(num_nodes=400, average_degree=3, seed=0)


@pytest.fixture(
    scope="module",
    params=[
        # not a multiple of 2, 3 or 4; one leaves a rank of 4 without nodes
        {"sample_nodes": 6, "samples": 1},
        {"batching": "cluster", "sequence_nodes": 13, "cluster_size": 5, "super_nodes": 6},
        {"sample_nodes": 1, "samples": 1},
        {"batching": "cluster", "sequence_nodes": 3, "cluster_size": 5, "super_nodes": 6},
    ],
    ids=["ego7", "cluster13", "ego2", "cluster3"],
)
def odd_options(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=[{"power_scope": "graph"}, {"power_scope": "batch"}, {"bias": "bucket", "max_distance": 3}],
    ids=["graph", "batch", "bucket"],
)
def odd(request, odd_options):
    """A builder of sequences that no layout divides, and the sequences of a whole batch and of a ragged one."""
    graph = synthetic_graph(num_nodes=60, average_degree=3, in_features=5, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megagraph.data.options.SEQUENCE_ALIGNMENT", 1)
        builder = prepared(graph, channels=3, global_tokens=2, **odd_options, **request.param)
    sequences = np.concatenate(builder.plan(np.arange(60), 4, np.random.default_rng(0)))
    return builder, (sequences[:4], sequences[4:5])


# sequences of a batch of four, and of one, for each dp rank, as a reader deals them out by weights
DEALT = {(1,): ((4,), (1,)), (1, 1): ((2, 2), (0, 1)), (1, 1, 1): ((1, 1, 2), (0, 0, 1)), (5, 2): ((2, 2), (0, 1))}
DEALT |= {(3, 1): ((3, 1), (0, 1)), (1, 3): ((1, 3), (0, 1)), (7, 1): ((3, 1), (0, 1))}
every_layout = pytest.mark.parametrize(
    ("weights", "cp", "num_microbatches"),
    [
        *(((1,), 2, 1), ((1,), 3, 1), ((1,), 4, 1), ((1, 1), 1, 2), ((1, 1), 2, 1), ((1, 1, 1), 1, 1), ((1, 1), 3, 3)),
        *(((3, 1), 1, 1), ((1, 3), 2, 2), ((5, 2), 1, 1), ((7, 1), 1, 3)),
    ],
)


def shares_of(odd, weights, cp, num_microbatches):
    """(whole batch, slice of the sequences of a rank, share) for every rank; of the ragged batch most are empty."""
    builder, items = odd
    mask = np.arange(60) % 5 != 0
    for item in items:
        whole = builder.build(item, mask, np.random.default_rng(0))
        assert whole.batch_size == len(item) and whole.num_targets > 0
        dealt, dp = DEALT[weights][len(item) == 1], len(weights)
        for dp_rank, number in enumerate(dealt):
            b = num_microbatches * max(1, math.ceil(number / num_microbatches))
            start = sum(dealt[:dp_rank])
            for cp_rank in range(cp):
                share = Share(dp_rank=dp_rank, dp=dp, cp_rank=cp_rank, cp=cp, num_microbatches=num_microbatches)
                if len(set(weights)) > 1:
                    share = replace(share, weights=weights)
                batch = builder.build(item, mask, np.random.default_rng(0), share)
                assert batch.layout == NodeLayout(whole.layout.num_nodes, whole.layout.num_super, cp_rank, cp)
                assert (batch.batch_size, batch.num_nodes) == (b, whole.num_nodes)
                yield whole, slice(start, start + number), batch


def hidden_rows(batch):
    """[b, S] True = padding of the sequence or of the layout."""
    rows = batch.layout.local_to_global
    return batch.key_padding_mask[:, rows] | (rows < 0)


@every_layout
def test_shares_have_their_rows_of_the_structure(odd, weights, cp, num_microbatches):
    for whole, run, batch in shares_of(odd, weights, cp, num_microbatches):
        mask = whole.key_padding_mask[run]
        assert torch.equal(batch.key_padding_mask[: len(mask)], mask)
        empty = batch.key_padding_mask[len(mask) :]
        assert empty[:, : batch.layout.num_nodes].all() and not empty[:, batch.layout.num_nodes :].any()
        rows = batch.layout.local_to_global
        held = rows >= 0
        structure = batch.structure[: len(mask)]
        torch.testing.assert_close(structure[..., held, :], whole.structure[run][..., rows[held], :])
        masked = hidden_rows(batch)[:, :, None] | batch.key_padding_mask[:, None]
        if batch.structure.ndim == 3:  # buckets
            assert ((batch.structure == 255) == masked).all()
        else:
            assert not batch.structure.movedim(1, -1)[masked].any()


def test_a_share_may_have_all_rows_of_the_structure(odd):
    builder, items = odd
    share, mask = Share(cp_rank=1, cp=3), np.arange(60) % 5 != 0
    shares = share, replace(share, whole_bias=True), Share()
    own, batch, whole = (builder.build(items[0], mask, np.random.default_rng(0), share) for share in shares)
    assert torch.equal(batch.structure, whole.structure)
    assert batch.layout == own.layout and torch.equal(batch.node_index, own.node_index)
    bytes_of_own, bytes_of_all = (builder.num_bytes(4, share) for share in shares[:2])
    sizes = [b.structure.untyped_storage().nbytes() for b in (own, batch)]
    assert bytes_of_all - bytes_of_own == sizes[1] - sizes[0] > 0


@every_layout
def test_shares_have_the_features_they_need(odd, weights, cp, num_microbatches):
    for whole, run, batch in shares_of(odd, weights, cp, num_microbatches):
        slots = batch.layout.local_to_global[:-2]  # global tokens have no features
        hidden = hidden_rows(batch)[:, :-2]
        assert batch.node_index.shape == hidden.shape and (batch.node_index[hidden] == 0).all()
        rows, whole_rows = (
            torch.cat([b.features, b.degrees[:, None], b.node_ids[:, None] + 1], dim=1) for b in (batch, whole)
        )
        tables = rows.chunk(num_microbatches)
        indices = batch.node_index.chunk(num_microbatches)
        rows = torch.cat([table[index] for table, index in zip(tables, indices, strict=True)])
        expected = whole_rows[whole.node_index[run]][:, slots]
        real = ~hidden[: len(expected)]
        assert torch.equal(rows[: len(expected)][real], expected[real])
        sizes = []
        for table, index, skip in zip(tables, indices, hidden.chunk(num_microbatches), strict=True):
            used = index[~skip].unique()
            assert used.tolist() == list(range(len(used))) and not table[len(used) :].any()
            if isinstance(odd[0], EgoBatches):  # a super node that two cluster sequences leave whole is in both
                assert len(table[: len(used)].unique(dim=0)) == len(used)
            sizes.append(len(used))
        assert len(batch.features) == num_microbatches * max(sizes)


def test_a_rank_with_an_empty_sequence_reads_no_rows():
    """What a step reads of a table it changes, so that must not depend on the layout."""
    graph = synthetic_graph(num_nodes=60, average_degree=3, in_features=5, seed=0)
    builder = prepared(graph, batching="cluster", sequence_nodes=128, cluster_size=10)
    (sequences,) = builder.plan(np.arange(60), 1, None)
    arguments = (sequences, np.ones(60, bool), np.random.default_rng(0))
    assert sorted(builder.build(*arguments).node_ids.tolist()) == list(range(60))
    second, first = (builder.build(*arguments, Share(dp_rank=rank, dp=2)) for rank in range(2))
    assert sorted(first.node_ids.tolist()) == list(range(60))
    assert len(second.node_ids) > 0 and (second.node_ids == -1).all()


@every_layout
def test_labels_of_all_shares_are_those_of_the_batch(odd, weights, cp, num_microbatches):
    found = {}
    for whole, run, batch in shares_of(odd, weights, cp, num_microbatches):
        assert batch.num_targets == whole.num_targets
        own = list(range(run.start, run.stop))
        assert batch.sequence_ids.tolist() == own + [whole.batch_size] * (batch.batch_size - len(own))
        for name in ("labels", "target_nodes"):
            key = whole.batch_size, name, run.start, run.stop
            found.setdefault(key, []).append(getattr(batch, name))
            if batch.layout.rank == cp - 1:
                blocks = torch.cat(found.pop(key), dim=1)
                expected = getattr(whole, name)[run]
                assert torch.equal(blocks[: len(expected)], expected) and (blocks[len(expected) :] == -1).all()


def test_loader_gives_the_shares_of_its_batches(graph):
    builder = prepared(graph, sample_nodes=4, samples=3)
    options = {"nodes": np.arange(0, 400, 7), "batch_size": 8, "seed": 0, "shuffle": True}
    whole = list(Loader(builder, **options).epoch(1))
    ranks = [Loader(builder, **options, share=Share(dp_rank=rank, dp=2)).epoch(1) for rank in range(2)]
    assert [len(epoch) for epoch in ranks] == 2 * [len(whole)]
    for batch, *shares in zip(whole, *ranks, strict=True):
        ids = torch.cat([share.sequence_ids for share in shares])
        nodes = torch.cat([share.features[share.node_index][:, 1:5] for share in shares])
        hidden = batch.key_padding_mask[:, 1:5]
        assert ids[ids < batch.batch_size].tolist() == batch.sequence_ids.tolist()
        expected = batch.features[batch.node_index][:, 1:5]
        assert torch.equal(nodes[ids < batch.batch_size][~hidden], expected[~hidden])


def test_a_target_sees_the_same_nodes_whoever_stands_beside_it(graph):
    builder = prepared(graph, sample_nodes=4, samples=3)

    def nodes(targets, seed):
        batch = builder.build(np.array(targets), np.ones(400, bool), np.random.default_rng(seed))
        seen = batch.node_ids[batch.node_index].masked_fill(batch.key_padding_mask[:, : batch.node_index.shape[1]], -1)
        return seen.view(len(targets), 3, -1)

    expected = nodes([5, 90, 17], seed=0)
    assert torch.equal(nodes([200, 17, 5], seed=0)[[2, 1]], expected[[0, 2]])
    assert not torch.equal(nodes([5, 90, 17], seed=1), expected)


def test_shares_sample_their_own_targets_only(graph, monkeypatch):
    builder = prepared(graph, sample_nodes=4, samples=3)
    asked = []
    call = Pagerank.__call__
    monkeypatch.setattr(Pagerank, "__call__", lambda self, sources: asked.append(sources) or call(self, sources))
    for rank in range(3):  # 10 of 30 sequences each: targets may be split, and two empty ones fill four runs
        share = Share(dp_rank=rank, dp=3, num_microbatches=4)
        builder.build(np.arange(10), np.ones(400, bool), np.random.default_rng(0), share)
    assert [sources.tolist() for sources in asked] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_a_share_that_does_not_embed_lacks_the_features_only(odd):
    builder, (item, *_) = odd
    mask = np.ones(60, bool)
    first, later = (
        builder.build(item, mask, np.random.default_rng(0), Share(num_microbatches=2, embeds=embeds))
        for embeds in (True, False)
    )
    for field in fields(Batch):
        a, b = getattr(first, field.name), getattr(later, field.name)
        if field.name in EMBEDDED:
            assert len(a) > 0 and len(b) == 0 and a.dtype == b.dtype
        else:
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dp_rank": 2, "dp": 2}, r"expected dp_rank in 0\.\.dp - 1 = 1, got 2"),
        ({"cp_rank": -1}, r"expected cp_rank in 0\.\.cp - 1 = 0, got -1"),
        ({"num_microbatches": 0}, "expected num_microbatches >= 1, got 0"),
        ({"weights": (1, 1)}, r"expected dp = 1 weights of at least 1, got \(1, 1\)"),
        ({"dp": 2, "weights": (0, 1)}, r"expected dp = 2 weights of at least 1, got \(0, 1\)"),
    ],
)
def test_share_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Share(**options)
