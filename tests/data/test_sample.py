import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph.data.datasets import synthetic_graph
from megagraph.data.sample import Neighbors, personalized_pagerank, sample_neighbors
from tests.data.graphs import dense_normalized, make_graph, random_graphs


def exact_pagerank(graph, alpha):
    return alpha * np.linalg.inv(np.eye(graph.num_nodes) - (1 - alpha) * dense_normalized(graph.adjacency))


@settings(deadline=None)
@given(random_graphs(), st.sampled_from([1e-1, 1e-2, 1e-4]))
def test_pagerank_is_within_its_bound(graph, epsilon):
    neighbors = personalized_pagerank(graph, epsilon=epsilon, chunk=5)
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
    everyone = personalized_pagerank(graph)
    sources = np.array([7, 3, 150])
    few = personalized_pagerank(graph, sources, max_candidates=5, chunk=2)
    assert few.indptr.tolist() == [0, 5, 10, 15]
    assert (few.indptr.dtype, few.nodes.dtype, few.weights.dtype) == (np.int64, np.int32, np.float32)
    for i, source in enumerate(sources):
        every = slice(everyone.indptr[source], everyone.indptr[source + 1])
        assert np.allclose(few.weights[5 * i : 5 * i + 5], np.sort(everyone.weights[every])[:-6:-1])


@given(random_graphs(), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_samples_are_candidates_without_replacement_then_padding(graph, k, num_samples, seed):
    neighbors = personalized_pagerank(graph, epsilon=1e-2)
    targets = np.arange(graph.num_nodes)[::-1]
    samples = sample_neighbors(neighbors, targets, num_samples, k, np.random.default_rng(seed))
    assert samples.shape == (len(targets), num_samples, k) and samples.dtype == np.int64
    for target, drawn in zip(targets, samples, strict=True):
        candidates = set(neighbors.nodes[neighbors.indptr[target] : neighbors.indptr[target + 1]])
        for nodes in drawn:
            real = nodes[nodes >= 0]
            assert len(real) == min(k, len(candidates)) == len(set(real)) and set(real) <= candidates
            assert (nodes[len(real) :] == -1).all()


def test_first_draws_are_proportional_to_weight():
    weights = np.array([1, 2, 4, 8], np.float32)
    neighbors = Neighbors(indptr=np.array([0, 4]), nodes=np.arange(4, dtype=np.int32), weights=weights)
    first = sample_neighbors(neighbors, np.array([0]), 20_000, 2, np.random.default_rng(0))[0]
    np.testing.assert_allclose(np.bincount(first[:, 0]) / 20_000, weights / 15, atol=0.01)
    # given that 3 came first, the second is drawn from the others in proportion
    second = first[first[:, 0] == 3, 1]
    np.testing.assert_allclose(np.bincount(second) / len(second), weights[:3] / 7, atol=0.015)


def test_isolated_sources_have_no_candidates():
    graph = make_graph(4, [(0, 1)])
    neighbors = personalized_pagerank(graph, np.array([2, 3]))
    assert neighbors.indptr.tolist() == [0, 0, 0]
    assert (sample_neighbors(neighbors, np.array([0, 1]), 2, 3, np.random.default_rng(0)) == -1).all()


def test_a_hub_has_candidates_whatever_epsilon():
    star = make_graph(50, [(0, i) for i in range(1, 50)])
    assert np.diff(personalized_pagerank(star, epsilon=0.5).indptr).min() == 1


@pytest.mark.parametrize("seed", [0, 1])
def test_samples_depend_on_the_generator_only(seed):
    neighbors = personalized_pagerank(synthetic_graph(num_nodes=100, seed=0))
    draws = [sample_neighbors(neighbors, np.arange(100), 2, 5, np.random.default_rng(seed + i)) for i in (0, 0, 1)]
    assert (draws[0] == draws[1]).all() and not (draws[0] == draws[2]).all()
