import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph.data.datasets import synthetic_graph
from megagraph.data.sample import Neighbors, Pagerank, sample_neighbors
from tests.data.graphs import dense_normalized, make_graph, random_graphs


def exact_pagerank(graph, alpha):
    return alpha * np.linalg.inv(np.eye(graph.num_nodes) - (1 - alpha) * dense_normalized(graph.adjacency))


@settings(deadline=None)
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
    samples = sample_neighbors(neighbors, num_samples, k, np.random.default_rng(seed))
    assert samples.shape == (len(targets), num_samples, k) and samples.dtype == np.int64
    for i, drawn in enumerate(samples):
        candidates = set(neighbors.nodes[neighbors.indptr[i] : neighbors.indptr[i + 1]])
        for nodes in drawn:
            real = nodes[nodes >= 0]
            assert len(real) == min(k, len(candidates)) == len(set(real)) and set(real) <= candidates
            assert (nodes[len(real) :] == -1).all()


def test_first_draws_are_proportional_to_weight():
    weights = np.array([1, 2, 4, 8], np.float32)
    neighbors = Neighbors(indptr=np.array([0, 4]), nodes=np.arange(4, dtype=np.int32), weights=weights)
    first = sample_neighbors(neighbors, 20_000, 2, np.random.default_rng(0))[0]
    np.testing.assert_allclose(np.bincount(first[:, 0]) / 20_000, weights / 15, atol=0.01)
    # given that 3 came first, the second is drawn from the others in proportion
    second = first[first[:, 0] == 3, 1]
    np.testing.assert_allclose(np.bincount(second) / len(second), weights[:3] / 7, atol=0.015)


def test_isolated_sources_have_no_candidates():
    graph = make_graph(4, [(0, 1)])
    neighbors = Pagerank(graph)(np.array([2, 3]))
    assert neighbors.indptr.tolist() == [0, 0, 0]
    assert (sample_neighbors(neighbors, 2, 3, np.random.default_rng(0)) == -1).all()


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


@pytest.mark.parametrize("options", [{"alpha": 0.0}, {"alpha": 1.0}, {"epsilon": 0.0}, {"max_candidates": 0}])
def test_pagerank_refuses(options):
    with pytest.raises(ValueError, match="expected 0 < alpha < 1, epsilon > 0 and max_candidates >= 1, got"):
        Pagerank(make_graph(3, [(0, 1)]), **options)


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_depend_on_the_generator_only(seed):
    neighbors = Pagerank(synthetic_graph(num_nodes=100, seed=0))(np.arange(100))
    draws = [sample_neighbors(neighbors, 2, 5, np.random.default_rng(seed + i)) for i in (0, 0, 1)]
    assert (draws[0] == draws[1]).all() and not (draws[0] == draws[2]).all()
