import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from megagraph.data import sample as sampling
from megagraph.data.datasets import synthetic_graph
from megagraph.data.sample import Neighbors, Pagerank, sample_neighbors
from tests.data.graphs import dense_normalized, make_graph, random_graphs


def exact_pagerank(graph, alpha):
    return alpha * np.linalg.inv(np.eye(graph.num_nodes) - (1 - alpha) * dense_normalized(graph.adjacency))


@given(random_graphs(), st.sampled_from([1e-1, 1e-2, 1e-4]))
def test_pagerank_is_within_its_bound(graph, epsilon):
    pagerank = Pagerank(graph, epsilon=epsilon, max_candidates=graph.num_nodes)
    neighbors = pagerank.push(np.arange(graph.num_nodes))
    exact = exact_pagerank(graph, 0.15)
    np.fill_diagonal(exact, 0)
    got = np.zeros_like(exact)
    row = np.repeat(np.arange(graph.num_nodes), np.diff(neighbors.indptr))
    got[row, neighbors.nodes] = neighbors.weights
    degree = np.diff(graph.indptr) + 1
    missing = exact - got
    assert (missing >= -1e-6).all()
    assert (missing <= epsilon * np.sqrt(np.outer(degree, degree)) + 1e-6).all()
    assert not (row == neighbors.nodes).any() and (neighbors.weights > 0).all()
    assert len(set(zip(row, neighbors.nodes, strict=True))) == len(row)


@given(random_graphs(), st.integers(1, 4))
def test_the_mass_of_the_candidates_is_their_part_of_the_exact_weight(graph, most):
    """Graphs are so small that all nodes are looked at."""
    pagerank = Pagerank(graph, epsilon=1e-3, max_candidates=most)
    exact = exact_pagerank(graph, 0.15)
    np.fill_diagonal(exact, 0)
    listed = pagerank(np.arange(graph.num_nodes)).weights.sum()
    want = listed / exact.sum() if exact.sum() > 0 else 1.0
    assert pagerank.mass() == pytest.approx(want, abs=1e-3)


def test_the_mass_of_a_large_graph_is_not_said(monkeypatch):
    monkeypatch.setattr(sampling, "_MOST_EXACT_EDGES", 10)
    assert Pagerank(synthetic_graph(num_nodes=100, num_classes=2)).mass() is None


def test_the_strongest_candidates_are_kept_for_the_sources_asked_for():
    graph = synthetic_graph(num_nodes=200, seed=0)
    sources = np.array([7, 3, 150])
    everyone = Pagerank(graph)(np.arange(200))
    few = Pagerank(graph, max_candidates=5)(sources)
    assert few.indptr.tolist() == [0, 5, 10, 15]
    assert (few.indptr.dtype, few.nodes.dtype, few.weights.dtype) == (np.int64, np.int32, np.float32)
    for i, source in enumerate(sources):
        every = slice(everyone.indptr[source], everyone.indptr[source + 1])
        assert np.allclose(few.weights[5 * i : 5 * i + 5], np.sort(everyone.weights[every])[:-6:-1])


@given(random_graphs(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_samples_are_candidates_without_replacement_then_padding(graph, k, num_samples, seed):
    targets = np.arange(graph.num_nodes)[::-1]
    neighbors = Pagerank(graph, epsilon=1e-2)(targets)
    samples = sample_neighbors(neighbors, targets, num_samples, k, seed)
    assert samples.shape == (len(targets), num_samples, k) and samples.dtype == np.int64
    for i, drawn in enumerate(samples):
        candidates = set(neighbors.nodes[neighbors.indptr[i] : neighbors.indptr[i + 1]])
        for nodes in drawn:
            real = nodes[nodes >= 0]
            assert len(real) == min(k, len(candidates)) == len(set(real)) and set(real) <= candidates
            assert (nodes[len(real) :] == -1).all()


def candidates_of(num_sources, weights):
    """The candidates 0, 1, ... of every source, with the same weights."""
    indptr = np.arange(num_sources + 1) * len(weights)
    nodes = np.tile(np.arange(len(weights), dtype=np.int32), num_sources)
    return Neighbors(indptr=indptr, nodes=nodes, weights=np.tile(np.array(weights, np.float32), num_sources))


@pytest.mark.parametrize(
    ("num_sources", "num_samples", "num_seeds"), [(1, 40_000, 1), (40_000, 1, 1), (20, 20, 100)], ids=str
)
def test_draws_are_proportional_to_weight(num_sources, num_samples, num_seeds):
    """Whatever of source, sample and seed it is that differs."""
    weights = np.array([1.0, 2, 4, 8, 0.5])
    neighbors = candidates_of(num_sources, weights)
    drawn = [sample_neighbors(neighbors, np.arange(num_sources), num_samples, 2, seed) for seed in range(num_seeds)]
    first, second = np.concatenate(drawn).reshape(-1, 2).T
    assert chisquare(np.bincount(first), len(first) * weights / weights.sum()).pvalue > 1e-3
    for node, weight in enumerate(weights):  # the second one is drawn from the others in proportion
        after = second[first == node]
        expected = len(after) * np.delete(weights, node) / (weights.sum() - weight)
        assert chisquare(np.delete(np.bincount(after, minlength=5), node), expected).pvalue > 1e-3


def test_draws_are_the_smallest_arrivals_of_the_formula():
    """The hash in Python's integers."""

    def mix64(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    neighbors = Pagerank(synthetic_graph(num_nodes=100, seed=0))(sources := np.array([3, 90]))
    for seed in (0, 2**64 - 1):
        drawn = sample_neighbors(neighbors, sources, 2, 5, seed)
        for i, source in enumerate(sources):
            candidates = slice(*neighbors.indptr[i : i + 2])
            for sample in range(2):
                key = mix64(mix64(mix64(seed) ^ int(source)) ^ sample)
                arrivals = {}
                for node, weight in zip(neighbors.nodes[candidates], neighbors.weights[candidates], strict=True):
                    mixed = mix64(key ^ (int(node) + 1) * 0x9E3779B97F4A7C15 % 2**64)
                    arrivals[int(node)] = -math.log(((mixed >> 11) + 1) * 2.0**-53) / float(weight)
                assert drawn[i, sample].tolist() == sorted(arrivals, key=arrivals.__getitem__)[:5]


def test_draws_depend_on_seed_source_and_sample_alone():
    pagerank = Pagerank(synthetic_graph(num_nodes=100, seed=0))

    def draw(sources, num_samples, k, seed):
        return sample_neighbors(pagerank(np.array(sources)), np.array(sources), num_samples, k, seed)

    expected = draw([7, 3, 60], 4, 5, seed=1)
    assert (draw([50, 60, 7], 4, 5, seed=1)[[2, 1]] == expected[[0, 2]]).all()
    assert (draw([3], 2, 5, seed=1) == expected[1:2, :2]).all()
    assert (draw([3], 4, 2, seed=1) == expected[1:2, :, :2]).all()
    assert not (draw([7, 3, 60], 4, 5, seed=2) == expected).all(axis=(1, 2)).any()
    assert len(np.unique(expected.reshape(12, 5), axis=0)) == 12


def test_isolated_sources_have_no_candidates():
    graph = make_graph(4, [(0, 1)])
    neighbors = Pagerank(graph)(sources := np.array([2, 3]))
    assert neighbors.indptr.tolist() == [0, 0, 0]
    assert (sample_neighbors(neighbors, sources, 2, 3, 0) == -1).all()


def test_a_hub_has_candidates_whatever_epsilon():
    star = make_graph(50, [(0, i) for i in range(1, 50)])
    assert np.diff(Pagerank(star, epsilon=0.5)(np.arange(50)).indptr).min() == 1


@pytest.mark.parametrize("stored", [0, 2**15], ids=["pushed", "stored"])
def test_sources_may_be_asked_for_in_any_order(stored, monkeypatch):
    graph = synthetic_graph(num_nodes=300, average_degree=3, seed=0)
    expected = Pagerank(graph, max_candidates=7).push(np.arange(300))
    monkeypatch.setattr("megagraph.data.sample.MAX_STORED_SOURCES", stored)
    sources = np.random.default_rng(0).integers(0, 300, 500)
    pagerank = Pagerank(graph, max_candidates=7)
    pagerank(sources[:10])  # leaves nothing behind
    got = pagerank(sources)
    for i, source in enumerate(sources):
        here, there = slice(*got.indptr[i : i + 2]), slice(*expected.indptr[source : source + 2])
        assert got.nodes[here].tolist() == expected.nodes[there].tolist()
        assert got.weights[here].tolist() == expected.weights[there].tolist()


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"max_candidates": 0}])
def test_pagerank_refuses(options):
    with pytest.raises(ValueError, match="expected epsilon > 0 and max_candidates >= 1, got"):
        Pagerank(make_graph(3, [(0, 1)]), **options)
