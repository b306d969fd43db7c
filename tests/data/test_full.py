"""The whole graph as one sequence: its pairs and their buckets by definition, its logits by dense attention."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import megagraph as mg
from megagraph.ablation import evaluate
from megagraph.data.batch import Share
from megagraph.data.coarsen import normalized_adjacency
from megagraph.data.datasets import synthetic_graph
from megagraph.data.full import PIECES, row_costs
from megagraph.data.graph import Graph
from megagraph.data.options import PAIR_CLASSES, BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.sample import Pagerank
from megagraph.data.smooth import propagated, with_degrees
from megagraph.data.start import bias_labels
from megagraph.evaluate import batches, choose_split, make_model
from megagraph.report import report
from megagraph.timeline import bubble_in_theory
from tests.data.graphs import dense_hops, dense_normalized, make_graph, random_graphs

SMALL = dict(batching="full", layers=2, dim=16, ffn_dim=16, heads=2, super_nodes=4, epochs=4, learning_rate=1e-2)


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=240, num_classes=3, in_features=16, homophily=0.9)


def options(**changes) -> BatchOptions:
    return BatchOptions(**(dict(batching="full", bias="bucket", super_nodes=3, max_distance=3) | changes))


def dense_index(data) -> np.ndarray:
    """Buckets [N, N] of a ``BorderedData``, 255 where a pair is absent."""
    n, s = data.super_columns.shape[1:]
    index = np.full((n + s, n + s), 255, np.uint8)
    starts, columns = data.relation.row_starts.numpy(), data.relation.columns.numpy()
    for row in range(n):
        own = slice(starts[row], starts[row + 1])
        index[row, columns[own]] = data.index.numpy()[own]
    index[:n, n:], index[n:] = data.super_columns[0].numpy(), data.super_rows[0].numpy()
    return index


def dense_rows(data) -> np.ndarray:
    """Buckets of the regular rows, of all columns; 255 where a pair is not listed."""
    index = np.full((len(data.relation.row_starts) - 1, data.relation.num_columns), 255, np.uint8)
    index[data.relation.rows(), data.relation.columns.long()] = data.index
    return np.concatenate([index, data.super_columns[0].numpy()], axis=1)


def the_batch(builder):
    (item,) = builder.plan(np.arange(3), 32, None)
    return item[0], builder.build(item, np.ones(builder.graph.num_nodes, bool), np.random.default_rng(0))


@settings(max_examples=40)
@given(graph=random_graphs(), hops=st.integers(1, 3), top=st.sampled_from([0, 2]))
def test_pairs_and_buckets_are_those_of_their_definition(graph, hops, top):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megagraph.data.pairs._CHUNK", 7)  # of entries at a time
        order, batch = the_batch(prepare(graph, options(hops=hops, top=top)))
    index = dense_index(batch.structure)
    adjacency = dense_normalized(graph.adjacency)
    apart = dense_hops(graph.adjacency.toarray(), hops)
    near = Pagerank(graph, max_candidates=max(top, 1))(np.arange(graph.num_nodes))
    for row, i in enumerate(order):
        listed = dict(
            zip(*(x[near.indptr[i] : near.indptr[i + 1]].tolist() for x in (near.nodes, near.weights)), strict=True)
        )
        for column, j in enumerate(order):
            if i == j:
                want, weight = 0, None
            elif apart[i, j] <= hops:
                weight = np.linalg.matrix_power(adjacency, apart[i, j])[i, j]
                want = 1 + PAIR_CLASSES * (apart[i, j] - 1)
            elif top and j in listed:
                weight, want = listed[j], 1 + PAIR_CLASSES * hops
            else:
                want, weight = 255, None
            if (
                weight is not None
            ):  # class c is from 2^-(c + 3) on to 2^-(c + 2); rounding may move a weight on its edge
                octaves = {int(np.clip(np.floor(-np.log2(weight * (1 + e))) - 2, 0, 7)) for e in (-1e-5, 0, 1e-5)}
                assert index[row, column] in {want + c for c in octaves}
            else:
                assert index[row, column] == want


@pytest.mark.parametrize(("size", "label"), [(2, "2^-3"), (5, "2^-3"), (9, "2^-4"), (300, "2^-9"), (520, None)])
def test_labels_of_buckets_say_which_weights_are_in_them(size, label):
    """Of a clique, whose A~ is 1 / size everywhere."""
    chosen = options(top=0)
    edges = np.stack(np.triu_indices(size, 1))
    builder = prepare(Graph.from_arrays("clique", np.ones((size, 1)), edges, np.zeros(size, int)), chosen)
    _, bucket = builder.structure.index.unique().tolist()
    assert bias_labels(chosen)[bucket] == ("hop 1, less" if label is None else f"hop 1, above {label}")


@settings(max_examples=20)
@given(graph=random_graphs())
def test_super_nodes_and_tokens_have_the_buckets_of_coarse_distances(graph):
    chosen = options(hops=1, top=0, global_tokens=1)
    builder = prepare(graph, chosen)
    order, batch = the_batch(builder)
    n, parts, first = graph.num_nodes, builder.coarsening.num_parts, chosen.num_pair_buckets
    index = dense_index(batch.structure)
    apart = dense_hops(builder.coarsening.adjacency.toarray(), 3)
    member = builder.coarsening.membership[order]
    for s in range(parts):
        for column in range(n + parts):
            other = member[column] if column < n else column - n
            own = column < n and other == s
            assert index[n + s, column] == first + (5 if own else apart[s, other]), (s, column)
    assert (index[:, -1] == first + 6).all() and (index[-1] == first + 6).all()
    assert np.array_equal(index[:n, n:], index[n:, :n].T)
    assert builder.structure.size == first + 7 == len(builder.structure.start)
    assert len(bias_labels(chosen)) == builder.structure.size


def test_a_batch_has_every_node_once_and_labels_of_those_that_count(graph):
    builder = prepare(graph, options())
    (item,) = builder.plan(np.array([5, 7]), 32, np.random.default_rng(0))
    some = np.zeros(graph.num_nodes, bool)
    some[[5, 7]] = True
    batch = builder.build(item, some, np.random.default_rng(0))
    assert sorted(item[0].tolist()) == list(range(graph.num_nodes)) and torch.equal(
        batch.target_nodes[0], torch.tensor(item[0])
    )
    assert batch.num_targets == 2 and (batch.labels >= 0).sum() == 2
    for node in (5, 7):
        (slot,) = np.flatnonzero(item[0] == node)
        assert batch.labels[0, slot] == graph.labels[node]
        assert np.array_equal(batch.features[batch.node_index[0, slot]].numpy(), graph.features[node])
    other = builder.build(item, ~some, np.random.default_rng(0))
    assert other.structure is batch.structure and other.num_targets == graph.num_nodes - 2


def partitions_of(builder, seed=0):
    """Slots and batch of each."""
    plan = builder.plan(np.arange(3), 32, np.random.default_rng(seed))
    everyone, rng = np.ones(builder.graph.num_nodes, bool), np.random.default_rng(0)
    return [(np.flatnonzero(np.isin(builder.order, item[0])), builder.build(item, everyone, rng)) for item in plan]


@settings(max_examples=20)
@given(graph=random_graphs(), number=st.integers(1, 4), top=st.sampled_from([0, 2]), seed=st.integers(0, 9))
def test_a_partition_is_the_whole_graph_without_other_nodes(graph, number, top, seed):
    number = min(number, graph.num_nodes)
    builder = prepare(graph, options(hops=2, top=top, partitions=number))
    order, whole = the_batch(builder)
    index, n = dense_index(whole.structure), graph.num_nodes
    found = partitions_of(builder, seed)
    assert sorted(slot for slots, _ in found for slot in slots) == list(range(n)) and len(found) == number
    for slots, batch in found:
        assert builder.structure.among(slots)[0] is builder.structure.among(slots.copy())[0]  # a rank asks twice
        kept = [*slots, *range(n, len(index))]
        np.testing.assert_array_equal(dense_index(batch.structure), index[np.ix_(kept, kept)])
        assert batch.structure.relation.columns.dtype == torch.int32
        assert batch.target_nodes[0].tolist() == order[slots].tolist()
        assert batch.labels[0].tolist() == graph.labels[order[slots]].tolist() and batch.num_targets == len(slots)
        for name in ("features", "degrees", "node_ids"):
            own, all_of_it = (getattr(x, name)[x.node_index[0]] for x in (batch, whole))
            assert torch.equal(own, all_of_it[kept[: len(own)]]), name


@pytest.mark.parametrize(("cluster_size", "number"), [(64, 64), (4, 5 * PIECES)], ids=["clusters", "most"])
def test_partitions_are_pieces_that_are_dealt_out_anew_every_epoch(cluster_size, number):
    graph = synthetic_graph(num_nodes=3000, num_classes=3, in_features=8, homophily=0.9)
    builder = prepare(graph, options(hops=1, top=0, partitions=5), cluster_size=cluster_size)
    pieces = [range(first, last) for first, last in pairwise(builder.pieces)]
    assert len(pieces) == number and set(builder.pieces[1:-1]) <= set(builder._ends.tolist())
    pairs = builder.structure.relation.row_starts.diff().numpy()
    within = sum(len(builder.structure.among(np.array(piece))[1]) for piece in pieces) / builder.structure.num_pairs
    sizes, (_, note) = [*map(len, pieces)], builder.notes(0.0)
    assert f"5 steps an epoch, to which {number} pieces of {min(sizes)} to {max(sizes)} nodes are" in note
    assert f"{within:.0%} of the pairs are within a piece" in note
    epochs, met = [partitions_of(builder, seed) for seed in range(9)], set()
    for epoch in epochs:
        of_slot = np.empty(3000, int)
        for step, (slots, _) in enumerate(epoch):
            of_slot[slots] = step
        owners = [of_slot[piece].tolist() for piece in pieces]
        assert all(len(set(own)) == 1 for own in owners)
        met |= {(i, j) for i in range(number) for j in range(i) if owners[i][0] == owners[j][0]}
        assert np.ptp(np.bincount([own[0] for own in owners])) <= 1
        work = [row_costs(pairs[slots], 3).sum() for slots, _ in epoch]
        assert max(work) <= 1.25 * np.mean(work)
    assert len(met) > 0.7 * number * (number - 1) / 2  # of partitions that stay the same a fifth
    attend = np.mean([sum(len(batch.structure.index) for _, batch in epoch) for epoch in epochs])
    said = float(note.split("% attend")[0].split()[-1]) / 100
    assert within < 0.9 * said and said == pytest.approx(attend / builder.structure.num_pairs, abs=0.02)


def test_a_rank_has_its_rows_of_a_partition(graph):
    builder = prepare(graph, options(top=4, partitions=3), cluster_size=1)
    everyone = np.ones(graph.num_nodes, bool)
    for item in builder.plan(None, 1, np.random.default_rng(0)):
        whole, *parts = (
            builder.build(item, everyone, np.random.default_rng(0), share)
            for share in (Share(), *(Share(cp_rank=rank, cp=2) for rank in range(2)))
        )
        index, n = dense_index(whole.structure), item.shape[1]
        np.testing.assert_array_equal(np.concatenate([dense_rows(part.structure) for part in parts]), index[:n])
        assert np.concatenate([part.target_nodes[0] for part in parts]).tolist() == item[0].tolist()
        slots = builder.slots(item)
        assert (np.diff(slots) > 0).all()
        wanted = []
        for part in parts:
            block = part.layout.block()
            named = (index[block.start : block.stop, :n] != 255).any(axis=0)
            wanted.append(named.sum() - named[block.start : block.stop].sum())
        assert builder.halo(2, slots) == wanted
        work = row_costs((index[:n, :n] != 255).sum(axis=1), 3).cumsum()
        ends = [place for place, slot in enumerate(slots) if place and slot in builder._ends]
        assert len(ends) > 9 and parts[0].layout.cuts[1] == min(ends, key=lambda end: abs(2 * work[end - 1] - work[-1]))


def test_the_bias_of_other_nodes_is_that_of_another_piece_with_as_many_pairs(graph):
    own, other = (
        prepare(graph, options(shuffle_structure=s, top=0, partitions=3), cluster_size=6) for s in (False, True)
    )
    plain = dense_index(the_batch(own)[1].structure)
    slot, pieces = np.argsort(own.order), np.split(other.order, other.pieces[1:-1])
    assert sorted(other.relabel) == list(range(240)) and np.array_equal(own.order, other.order)
    of_node = np.empty(240, int)
    for number, nodes in enumerate(pieces):
        of_node[nodes] = number
    moved = [of_node[other.relabel[nodes]] for nodes in pieces]
    assert all(np.ptp(to) == 0 for to in moved) and np.mean([to[0] != i for i, to in enumerate(moved)]) > 0.8
    assert np.ptp([*map(len, pieces)]) <= 1
    assert np.mean([(np.diff(other.relabel[np.sort(nodes)]) < 0).any() for nodes in pieces]) > 0.5
    for _, batch in (found := partitions_of(other)):
        rows = slot[other.relabel[batch.target_nodes[0].numpy()]]
        n = len(rows)
        np.testing.assert_array_equal(dense_index(batch.structure)[:n, :n], plain[np.ix_(rows, rows)])
    pairs = [sum(len(batch.structure.index) for _, batch in epoch) for epoch in (found, partitions_of(own))]
    assert pairs[0] > 0.8 * pairs[1]


@pytest.mark.parametrize("model", ["hierarchical", "graphormer"])
def test_logits_and_gradients_are_those_of_dense_attention(graph, model, tmp_path):
    config = mg.TrainConfig(**SMALL, model=model, dtype="fp64", hops=2, top=3, out=tmp_path / "run")
    builder = batches(config, graph)
    _, batch = the_batch(builder)
    sizes = config.model_config(in_features=16, num_classes=3, bias_size=builder.structure.size)
    torch.manual_seed(0)
    made = make_model(config, sizes).double()
    key = torch.tensor([7], dtype=torch.int32)
    index = torch.from_numpy(dense_index(batch.structure))[None]
    found = []
    for structure in (batch.structure, index):
        inputs = replace(batch, features=batch.features.double()).model_inputs(key) | {"structure": structure}
        made.zero_grad()
        logits = made.train()(**inputs)
        logits.square().sum().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in made.parameters())])
    assert logits.shape == (1, 240, 3)
    for ours, dense in zip(*found, strict=True):
        torch.testing.assert_close(ours, dense, rtol=1e-9, atol=1e-10)


def dense_neighbours(given) -> np.ndarray:
    """Rows of A~ of a ``Neighbours``, [R, N']."""
    matrix = np.zeros((len(given.relation.row_starts) - 1, given.relation.num_columns))
    matrix[given.relation.rows(), given.relation.columns.long()] = given.weights
    return matrix


@pytest.mark.parametrize(
    "changes", [{}, dict(hops=2, top=4), dict(shuffle_structure=True)], ids=["one", "more", "other"]
)
def test_neighbours_are_those_of_the_graph_whoever_attends(graph, changes):
    builder = prepare(graph, options(convolution=True, **changes), cluster_size=16)
    (item,), batch = builder.plan(np.arange(3), 32, None), the_batch(builder)[1]
    nodes, whole = item[0], dense_normalized(graph.adjacency)
    np.testing.assert_allclose(dense_neighbours(batch.neighbours), whole[np.ix_(nodes, nodes)], rtol=1e-6)
    shares = [Share(cp_rank=rank, cp=3) for rank in range(3)]
    labels = np.ones(240, bool)
    parts = [builder.build(item, labels, np.random.default_rng(0), share).neighbours for share in shares]
    np.testing.assert_array_equal(np.concatenate([*map(dense_neighbours, parts)]), dense_neighbours(batch.neighbours))
    assert the_batch(prepare(graph, options(**changes)))[1].neighbours is None


def test_neighbours_in_a_partition_are_those_of_its_own_graph(graph):
    builder = prepare(graph, options(convolution=True, partitions=3), cluster_size=16)
    for _, batch in partitions_of(builder):
        nodes = batch.target_nodes[0].numpy()
        own = dense_normalized(graph.adjacency[nodes][:, nodes])
        np.testing.assert_allclose(dense_neighbours(batch.neighbours), own, rtol=1e-6)


@pytest.mark.parametrize("share", [Share(), Share(cp_rank=1, cp=3)], ids=["whole", "rank"])
def test_bytes_are_those_of_what_is_built(graph, share):
    """Lists of pairs, columns twice until they are joined; of neighbours all but where rows and columns start."""
    builder, plain = (prepare(graph, options(top=4, convolution=c), cluster_size=16) for c in (True, False))
    batch = builder.build(builder.order[None], np.ones(240, bool), np.random.default_rng(0), share)
    data, more = batch.structure, batch.neighbours
    lists = sum(x.nbytes for x in data.tensors) - 2 * 8  # starts without the last one
    assert builder.structure.num_bytes(1, batch.layout) == lists + data.relation.columns.nbytes
    of_entries = [more.weights, *(x for name, x in more.relation.lists.items() if not name.endswith("starts"))]
    assert builder.num_bytes(1, share) - plain.num_bytes(1, share) == sum(x.nbytes for x in of_entries)


@pytest.mark.parametrize("model", ["hierarchical", "graphormer"])
def test_a_convolution_adds_a_sum_over_neighbours_to_attention(graph, model, tmp_path):
    config = mg.TrainConfig(**SMALL, model=model, dtype="fp64", convolution=True, out=tmp_path / "run")
    builder = batches(config, graph)
    _, batch = the_batch(builder)
    torch.manual_seed(0)
    made = make_model(config, config.model_config(in_features=16, num_classes=3, bias_size=builder.structure.size))
    made, dense = made.double(), torch.from_numpy(dense_neighbours(batch.neighbours))
    key = torch.tensor([7], dtype=torch.int32)
    inputs = replace(batch, features=batch.features.double()).model_inputs(key)
    found = []
    for by_hand in (False, True):
        made.zero_grad()
        if by_hand:
            for layer in made.layers.values():
                weight, layer.convolution = layer.convolution.weight, None
                layer.register_parameter("weight", weight)

                def add(attention, given, out, weight=weight):
                    return out + torch.nn.functional.pad(
                        dense @ given[0][0, :240] @ weight.T, (0, 0, 0, out.shape[1] - 240)
                    )

                layer.attention.register_forward_hook(add)
        logits = made.train()(**inputs)
        logits.square().sum().backward()
        found.append({name.replace("convolution.", ""): p.grad.clone() for name, p in made.named_parameters()})
        found[-1]["logits"] = logits.detach()
    assert found[0].keys() == found[1].keys() and len(found[0]) > 30
    for name, ours in found[0].items():
        torch.testing.assert_close(ours, found[1][name], rtol=1e-9, atol=1e-10, msg=name)
    with pytest.raises(ValueError, match="neighbours are needed by a model with a convolution"):
        make_model(config, made.config).double()(**inputs | {"neighbours": None})


def test_a_convolution_learns_resumes_predicts_and_is_left_out(tmp_path, graph):
    changes = dict(convolution=True, epochs=12, partitions=2, checkpoint_every=9, keep=9)
    summary, config = train(tmp_path, graph, **changes)
    assert summary.test_accuracy > 0.6 > summary.majority_accuracy
    test = choose_split(graph, config).test
    classes = mg.predict(config.out, graph)[test].argmax(axis=1)
    assert (classes == graph.labels[test]).mean() == summary.test_accuracy
    results = evaluate(config.out, graph, ["convolution", "bias"])
    assert results["whole"]["test_accuracy"] == summary.test_accuracy and results["convolution"]["changed_classes"] > 0
    losses = [line["loss"] for line in lines_of(config.out)[0]]
    mg.Trainer.resume(config.out, resume_step=9).fit(graph)
    assert [line["loss"] for line in lines_of(config.out)[0]] == losses and len(losses) == 24


def train(tmp_path, graph, name="run", **changes):
    config = mg.TrainConfig(**(SMALL | dict(out=tmp_path / name) | changes))
    return mg.Trainer(config).fit(graph), config


def lines_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "step" in line], [line for line in lines if "epoch" in line]


def test_learns_resumes_predicts_and_is_evaluated(tmp_path, graph):
    summary, config = train(tmp_path, graph, epochs=12)
    assert summary.test_accuracy > 0.6 > summary.majority_accuracy and summary.steps == 12
    assert summary.sequence_nodes == 240 + 4
    probabilities = mg.predict(config.out, graph)
    test = choose_split(graph, config).test
    accuracy = (probabilities[test].argmax(axis=1) == graph.labels[test]).mean()
    assert probabilities.shape == (240, 3) and accuracy == summary.test_accuracy
    results = evaluate(config.out, graph, ["bias", "super_nodes", "features"])
    assert results["whole"]["test_accuracy"] == accuracy and results["features"]["changed_classes"] > 0.2
    assert np.allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    train(tmp_path, graph, "half", epochs=12, max_steps=5)
    resumed = mg.Trainer.resume(tmp_path / "half", max_steps=12).fit(graph)
    steps = [lines_of(tmp_path / run)[0] for run in ("run", "half")]
    assert len(steps[0]) == len(steps[1]) == 12 and steps[0][0]["loss"] == steps[1][0]["loss"]
    assert resumed.steps == 12


def test_so_small_a_graph_is_evaluated_without_its_tokens(tmp_path):
    """It has no padding, but then."""
    small = synthetic_graph(num_nodes=60, num_classes=3, in_features=16)
    _, config = train(tmp_path, small, super_nodes=12, global_tokens=8, epochs=1)
    results = evaluate(config.out, small, ["global_token"])
    assert 0 <= results["global_token"]["changed_classes"] <= 1


@pytest.mark.slow
def test_structure_of_other_nodes_tells_nothing(tmp_path, graph):
    """Structure of other nodes has the same number of pairs of the same kinds, and trains worse for it."""
    own, other = (the_batch(prepare(graph, options(shuffle_structure=s)))[1].structure for s in (False, True))
    assert sorted(own.index.tolist()) == sorted(other.index.tolist())
    assert not torch.equal(own.relation.columns, other.relation.columns)
    best, _ = train(tmp_path, graph, "own", epochs=25)
    blind, _ = train(tmp_path, graph, "blind", epochs=25, shuffle_structure=True)
    assert best.best_val_accuracy > blind.best_val_accuracy + 0.05


def test_propagated_features_are_powers_of_the_adjacency(graph):
    wide = propagated(graph, 2)
    x = graph.features.astype(np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    power, size = x / norms, np.sqrt(np.square(norms).mean())
    for step in range(3):
        block = wide.features[:, 16 * step : 16 * (step + 1)]
        unit = np.sqrt(np.square(power).sum(axis=1).mean())
        np.testing.assert_allclose(block, power * size / unit, rtol=1e-4, atol=1e-5)
        power = dense_normalized(graph.adjacency) @ power
    assert propagated(graph, 0) is graph
    for size in np.float32([2.0**-90, 2.0**63, 2.0**100]):  # whose squares float32 does not have
        scaled = replace(graph, features=graph.features * size)
        np.testing.assert_array_equal(propagated(scaled, 2).features, wide.features * size)
    with pytest.raises(ValueError, match=r"norms are finite in float32, .*--propagate 2.*, got some of 4e\+38; scale"):
        propagated(replace(graph, features=np.full((240, 16), 1e38, np.float32)), 2)


@pytest.mark.parametrize("kind", [np.float32, np.float16, sp.csr_array])
def test_degrees_are_a_feature(graph, kind):
    x = np.where(np.random.default_rng(0).random((240, 16)) < 0.3, graph.features, 0).astype(np.float16)
    own = kind(x.astype(np.float32)) if kind is sp.csr_array else x.astype(kind)
    wide = with_degrees(replace(graph, features=own)).features
    assert type(wide) is type(own) and wide.dtype == own.dtype and wide.shape == (240, 17)
    rows = (wide.toarray() if sp.issparse(wide) else wide).astype(np.float64)
    assert np.array_equal(rows[:, :16], x)
    logs = np.log([1 + len(set(row.indices)) for row in graph.adjacency.tocsr()])
    assert np.corrcoef(rows[:, 16], logs)[0, 1] > 1 - 1e-6 and abs(rows[:, 16].mean()) < 1e-3
    np.testing.assert_allclose(np.square(rows[:, 16]).mean(), np.square(x[x != 0].astype(float)).mean(), rtol=2e-3)
    ring = Graph.from_data(Data(x=torch.ones(5, 2), edge_index=torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])))
    assert not with_degrees(ring).features[:, 2].any()  # nothing to tell
    if kind is np.float16:  # which ends at 65,504
        star = Data(x=torch.full((4000, 2), 3000.0), edge_index=torch.stack([torch.zeros(3999), torch.arange(1, 4000)]))
        star.edge_index = star.edge_index.long()
        far = with_degrees(replace(Graph.from_data(star), features=np.full((4000, 2), 3000, np.float16))).features
        assert np.isfinite(far).all() and far[0, 2] > 6e4


@pytest.mark.parametrize("batching", ["full", "ego"])
def test_degrees_are_learned_from(tmp_path, graph, batching):
    degrees = np.diff(graph.indptr)
    plain = replace(graph, features=graph.features[:, :0], labels=(degrees > np.median(degrees)).astype(np.int64))
    changes = dict(batching=batching, sample_nodes=4, samples=2, channels=2, super_nodes=None)
    with pytest.raises(ValueError, match=r"expected nodes with features, got none; .* or --degree-input"):
        train(tmp_path, plain, **changes)
    summary, config = train(tmp_path, plain, degree_input=True, init="xavier", epochs=20, dropout=0.0, **changes)
    assert summary.test_accuracy > 0.95 > summary.majority_accuracy + 0.2
    assert mg.predict(config.out, plain).shape == (240, 3)
    with pytest.raises(ValueError, match="trained on 0 features a node, got a graph with 16"):
        mg.predict(config.out, graph)


@pytest.mark.slow
def test_propagated_features_train_and_predict(tmp_path, graph):
    for batching in ("full", "ego"):
        changes = dict(
            propagate=2, batching=batching, sample_nodes=4, samples=2, channels=2, super_nodes=None, epochs=2
        )
        _, config = train(tmp_path, graph, batching, **changes)
        assert mg.predict(config.out, graph).shape == (240, 3)
        with pytest.raises(ValueError, match="trained on 16 features a node, got a graph with 5"):
            mg.predict(config.out, replace(graph, features=graph.features[:, :5]))


def test_training_takes_a_step_on_every_partition(tmp_path, graph):
    changes = dict(partitions=4, epochs=6, label_input=0.3, checkpoint_every=10, keep=9)
    summary, config = train(tmp_path, graph, **changes)
    assert summary.steps == 24 and summary.epochs == 6 and summary.sequence_nodes == 244
    assert summary.test_accuracy > 0.6 > summary.majority_accuracy
    assert mg.predict(config.out, graph).shape == (240, 3)
    report([config.out], tmp_path / "report.html")
    assert "full batches in 4 partitions, 2 heads" in (tmp_path / "report.html").read_text()
    losses = [line["loss"] for line in lines_of(config.out)[0]]
    mg.Trainer.resume(config.out, resume_step=10).fit(graph)  # within an epoch
    assert [line["loss"] for line in lines_of(config.out)[0]] == losses and len(losses) == 24


def test_a_graph_of_fewer_nodes_than_partitions_is_predicted(tmp_path, graph):
    _, config = train(tmp_path, graph, partitions=7, epochs=1)
    x, edge_index = torch.from_numpy(graph.features[:5]), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]])
    small = Data(x=x, edge_index=edge_index)
    np.testing.assert_array_equal(mg.predict(config.out, small), mg.predict(config.out, small, partitions=1))


def test_evaluation_from_time_to_time_is_the_same_training(tmp_path, graph):
    changes = dict(partitions=2, epochs=7, checkpoint_every=9, keep=9)
    every, _ = train(tmp_path, graph, "every", **changes)
    some, config = train(tmp_path, graph, "some", **changes, evaluate_every=3)
    steps, epochs = lines_of(config.out)
    all_steps, all_epochs = lines_of(tmp_path / "every")
    losses = [line["loss"] for line in steps]
    assert losses == [line["loss"] for line in all_steps] and some.steps == len(losses) == 14
    assert [line["epoch"] for line in epochs] == [2, 5, 6] and some.epochs == every.epochs == 7
    for line, means in zip(epochs, (losses[:6], losses[6:12], losses[12:]), strict=True):
        same = all_epochs[line["epoch"]]
        assert all(line[name] == same[name] for name in ("val_accuracy", "test_accuracy"))
        assert line["loss"] == pytest.approx(np.mean(means)) and line["train_seconds"] > 0
    assert some.best_val_accuracy == max(line["val_accuracy"] for line in epochs)
    resumed = mg.Trainer.resume(config.out, resume_step=9).fit(graph)  # after an epoch that was not evaluated, and half
    again = lines_of(config.out)
    assert [line["loss"] for line in again[0]] == losses
    assert [(line["epoch"], line["loss"]) for line in again[1]] == [(line["epoch"], line["loss"]) for line in epochs]
    assert resumed.best_epoch == some.best_epoch and resumed.epochs == 7


def test_patience_ends_a_run(tmp_path, graph):
    summary, config = train(tmp_path, graph, epochs=200, patience=3)
    values = [line["val_accuracy"] for line in lines_of(config.out)[1]]
    best = values.index(max(values))
    assert summary.epochs == len(values) == best + 4 < 200 and summary.best_epoch == best
    assert all(len(values[:i]) - 1 - values[:i].index(max(values[:i])) < 3 for i in range(1, len(values)))


@pytest.mark.parametrize("several", [False, True])
def test_a_label_that_is_input_does_not_count(graph, several):
    if several:
        labels = np.stack([graph.labels == c for c in range(3)], axis=1).astype(np.int8)
        labels[::3] = np.where(labels[::3] == 1, 1, -1)  # of some nodes the others are not known
        graph = replace(graph, labels=labels)
    known = np.random.default_rng(1).random(240) < 0.6
    builder = prepare(graph, options(label_input=0.3), known=np.flatnonzero(known))
    (item,), wanted = builder.plan(np.arange(3), 32, None), np.zeros((240, 3), np.float32)
    wanted[np.arange(240), graph.labels.argmax(axis=1) if several else graph.labels] = 1

    def build(mask, seed=0):
        """Which labels are input, which count."""
        batch = builder.build(item, mask, np.random.default_rng(seed))
        nodes, counts = batch.node_ids.numpy(), batch.labels[0].numpy()
        columns = batch.features[:, 16:].numpy()[np.argsort(np.where(nodes < 0, 1 << 60, nodes))]
        assert batch.features.shape[1] == builder.in_features == 19 and not columns[240:].any()
        shown, counted = columns[:240].any(axis=1), np.zeros(240, bool)
        counted[item[0]] = counts.max(axis=-1) >= 0 if several else counts >= 0
        assert (columns[:240][shown] == wanted[shown]).all() and batch.num_targets == (counts >= 0).sum()
        return shown, counted

    parts = []
    for seed in range(20):
        shown, counted = build(known, seed)
        assert not (shown & counted).any() and (shown | counted == known).all()
        parts.append(shown.sum() / known.sum())
    assert 0.25 < np.mean(parts) < 0.35 and len(set(parts)) > 5
    for mask in (~known, np.ones(240, bool)):  # evaluation, prediction
        shown, counted = build(mask)
        assert (shown == known).all() and (counted == mask & ~known).all()
    only = np.zeros(240, bool)
    only[np.flatnonzero(known)[0]] = True
    assert all((build(only, seed)[1] == only).all() for seed in range(9))  # something always counts
    several = prepare(graph, options(label_input=0.9, partitions=3), known=np.flatnonzero(known))
    for part in several.plan(None, 1, np.random.default_rng(0)):  # in every partition, too
        few = np.zeros(240, bool)
        few[part[0][known[part[0]]][:1]] = few[np.flatnonzero(known)[:3]] = True
        assert all(several.build(part, few, np.random.default_rng(seed)).num_targets for seed in range(9))


def test_labels_tell_what_features_do_not(tmp_path, graph):
    graph = replace(graph, features=np.ones((240, 16), np.float32))
    changes = dict(epochs=30, dropout=0.0, input_dropout=0.0, attention_dropout=0.0, hops=1, top=0)
    found = [train(tmp_path, graph, str(part), label_input=part, **changes)[0].test_accuracy for part in (0.0, 0.5)]
    assert found[1] > found[0] + 0.2
    # labels of other nodes than those of training are not looked at
    split = choose_split(graph, mg.TrainConfig(**SMALL))
    labels = graph.labels.copy()
    labels[split.val], labels[split.test] = labels[split.val][::-1], labels[split.test][::-1]
    one, other = (mg.predict(tmp_path / "0.5", x) for x in (graph, replace(graph, labels=labels)))
    assert np.array_equal(one, other)
    # a part of a graph may lack the last class; more than the model knows are none of its own
    last = graph.num_classes - 1
    fewer = np.where(labels == last, -1, labels)
    lacks = [replace(graph, labels=fewer, num_classes=n) for n in (last, graph.num_classes)]
    assert np.array_equal(*(mg.predict(tmp_path / "0.5", x) for x in lacks))
    more = replace(graph, labels=np.where(labels == last, last + 1, labels), num_classes=last + 2)
    for use in (mg.predict, mg.ablation.evaluate):
        with pytest.raises(ValueError, match=f"trained on {last + 1} classes, .* a graph with {last + 2} classes"):
            use(tmp_path / "0.5", more)


BAD = {
    "pairs": (dict(max_pairs=700), "at most 700 pairs of nodes"),
    "dp": (dict(plan="1,1,2"), "plan must have dp = 1"),
    "auto": (dict(plan="auto", dp=2), "plan must have dp = 1"),
    "halo of ego batches": (dict(batching="ego", plan="1,2,1", comm="halo"), "comm must be ring, allgather or ulysses"),
    "halo alone": (dict(comm="halo"), "comm must be 'ring' for cp = 1"),
    "microbatches": (dict(plan="2,1,1", microbatches=2), "microbatches 1"),
    "projected": (dict(bias="projected"), "bias must be bucket"),
    "buckets": (dict(hops=40), "at most 255 buckets, got"),
    "hops": (dict(hops=0), "hops must be at least 1"),
    "top": (dict(top=-1), "top must be at least 0"),
    "propagate": (dict(propagate=-1), "propagate must be at least 0"),
    "patience": (dict(patience=-1), "patience must be at least 0"),
    "evaluate_every": (dict(evaluate_every=0), "evaluate_every must be at least 1"),
    "no partition": (dict(partitions=0), "partitions must be at least 1"),
    "partitions of nobody": (dict(partitions=241), "partitions must be at most 240, the nodes, got 241"),
    "partitions of ego batches": (dict(batching="ego", partitions=2), "partitions needs batching full, got ego"),
    "all labels": (dict(label_input=1.0), r"label_input must be in \[0, 1\), got 1.0"),
    "labels of ego batches": (dict(batching="ego", label_input=0.5), "label_input needs batching full, got ego"),
    "a convolution of ego batches": (
        dict(batching="ego", convolution=True),
        "convolution needs batching full, got ego",
    ),
    "degrees beside vectors": (dict(embedding="learned", degree_input=True), "degree_input needs embedding features"),
    "averages beside vectors": (dict(embedding="learned", propagate=2), "propagate needs embedding features"),
    "labels beside vectors": (dict(embedding="learned", label_input=0.5), "label_input needs embedding features"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, tmp_path, graph):
    changes, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        train(tmp_path, graph, **changes)
    assert not (tmp_path / "run/model.safetensors").exists()


def test_ranks_hold_whole_clusters_of_equal_work():
    graph = synthetic_graph(num_nodes=3000, num_classes=3, in_features=8, homophily=0.9)
    builder = prepare(graph, options(hops=1, top=4))
    pairs = builder.structure.relation.row_starts.diff().numpy()
    for world_size in (2, 3, 8):
        cuts = builder.cuts(world_size)
        work = [row_costs(pairs[start:end], 4).sum() for start, end in pairwise(cuts)]
        assert max(work) <= 1.1 * np.mean(work) and len(work) == world_size
        assert set(cuts[1:-1]) <= set(builder._ends.tolist())
    assert builder.cuts(2500)[-1] == 3000 and len(set(builder.cuts(2500))) == 2501  # more ranks than clusters


def test_a_rank_holds_its_rows_alone(graph):
    builder = prepare(graph, options(top=4), cluster_size=16)
    whole = dense_index(the_batch(builder)[1].structure)
    (item,) = builder.plan(np.arange(3), 32, None)
    labels = np.random.default_rng(1).random(240) < 0.5
    shares = [Share(cp_rank=rank, cp=3) for rank in range(3)]
    parts = [builder.build(item, labels, np.random.default_rng(0), share) for share in shares]
    rows, n = np.concatenate([dense_rows(part.structure) for part in parts]), 240
    np.testing.assert_array_equal(rows, whole[:n])
    for part in parts:
        at = part.layout.local_to_global.numpy()
        np.testing.assert_array_equal(part.structure.super_rows[0], whole[n:][:, at])
    targets = np.concatenate([part.target_nodes[0] for part in parts])
    np.testing.assert_array_equal(targets, builder.order)
    counted = np.concatenate([part.labels[0] for part in parts])
    np.testing.assert_array_equal(counted, np.where(labels, graph.labels, -1)[builder.order])
    assert {part.num_targets for part in parts} == {int(labels.sum())}
    given = builder.build(item, labels, np.random.default_rng(0), Share(cp_rank=1, cp=3, whole_bias=True))
    np.testing.assert_array_equal(dense_index(given.structure), whole)
    assert given.layout == parts[1].layout


def test_a_batch_that_was_moved_is_kept(graph):
    """Kernels put the pairs of one and the same relation into tiles once."""
    builder = batches(mg.TrainConfig(**SMALL), graph)
    data = builder.build(builder.order[None], np.ones(240, bool), np.random.default_rng(0)).structure
    moved = data.to("meta")
    assert data.to("meta") is moved and moved.index.device.type == "meta" and data.to("cpu") is data


def test_the_memory_of_a_batch_is_all_of_its_tensors(graph):
    """Those that another stream has copied are kept until this one has used them."""
    batch, found = the_batch(prepare(graph, options(convolution=True)))[1], set()

    class Search(pickle.Pickler):
        def persistent_id(self, x):
            if isinstance(x, torch.Tensor):
                found.add(x.data_ptr())

    Search(io.BytesIO()).dump(batch)
    assert len(found) > 20 and found == {x.data_ptr() for x in batch.memory()}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_rows_that_ranks_name(graph, world_size):
    builder = batches(mg.TrainConfig(**SMALL), graph)
    relation, cuts = builder.structure.relation, builder.cuts(world_size)
    pairs = list(zip(relation.rows().tolist(), relation.columns.tolist(), strict=True))
    wanted = []
    for first, last in pairwise(cuts):
        wanted.append(len({column for row, column in pairs if first <= row < last and not first <= column < last}))
    assert builder.halo(world_size) == wanted and max(wanted) > 0


def test_stages_of_one_sequence_say_how_long_they_wait(graph):
    said = prepare(graph, options()).notes(bubble_in_theory(mg.Plan(pp=2)))
    assert said[-1] == "stages have one sequence to work on: each rank waits 50% of a step for others"


@pytest.mark.parametrize("most", [100_000, 1_000_000])
def test_pairs_are_counted_before_they_are_made(monkeypatch, most):
    """Two hops from a hub are all nodes: a lower bound is enough. Elsewhere those of some nodes, or of all, tell."""

    class Counted(sp.csr_array):
        def __matmul__(self, other):
            raise AssertionError("made")

    monkeypatch.setattr("megagraph.data.pairs.normalized_adjacency", lambda x: Counted(normalized_adjacency(x)))
    star = replace(synthetic_graph(num_nodes=600, average_degree=60.0), split=None)
    with pytest.raises(ValueError, match=r"or more with --hops 2"):
        prepare(star, options(hops=2, top=0, max_pairs=38_000))
    ends = np.random.default_rng(0).integers(0, 2000, (2, 30_000))
    even = make_graph(2000, ends.T)
    with pytest.raises(ValueError, match=r"got (about )?1,\d{3},\d{3} or more with --hops 2 and --top 0, 2\d.\d+ MiB"):
        prepare(even, options(hops=2, top=0, max_pairs=most))
