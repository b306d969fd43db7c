import numpy as np
import pytest

from megagraph.data.coarsen import coarsen, normalized_adjacency, partition
from megagraph.data.datasets import synthetic_graph
from tests.data.graphs import dense_normalized, make_graph


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=300, seed=0)


def test_parts_are_numbered_without_gaps_and_repeatable(graph):
    parts = partition(graph, 40)
    assert parts.dtype == np.int32 and len(parts) == graph.num_nodes
    assert np.unique(parts).tolist() == list(range(parts.max() + 1)) and parts.max() < 40
    assert (partition(graph, 40) == parts).all()


@pytest.mark.parametrize("num_parts", [1, 40])
def test_coarse_graph_is_the_formula(graph, num_parts):
    coarse = coarsen(graph, num_parts)
    one_hot = np.eye(coarse.num_parts)[coarse.membership]
    size = one_hot.sum(axis=0)
    np.testing.assert_allclose(coarse.features, one_hot.T @ graph.features / size[:, None], rtol=1e-5, atol=1e-6)
    scaled = one_hot / np.sqrt(size)
    contracted = scaled.T @ graph.adjacency.toarray() @ scaled + np.eye(coarse.num_parts)
    scale = contracted.sum(axis=1) ** -0.5
    np.testing.assert_allclose(coarse.adjacency.toarray(), scale[:, None] * contracted * scale, rtol=1e-5)
    assert coarse.features.dtype == coarse.adjacency.dtype == np.float32


def test_no_more_parts_than_nodes_is_fine():
    graph = make_graph(5, [(0, 1), (1, 2)])
    assert coarsen(graph, 5).num_parts <= 5


@pytest.mark.parametrize("num_parts", [0, 6])
def test_part_counts_are_checked(num_parts):
    with pytest.raises(ValueError, match=f"expected 1 <= num_parts <= 5 nodes, got {num_parts}"):
        coarsen(make_graph(5, [(0, 1)]), num_parts)


def test_normalized_adjacency_is_the_formula(graph):
    normalized = normalized_adjacency(graph.adjacency)
    np.testing.assert_allclose(normalized.toarray(), dense_normalized(graph.adjacency), rtol=1e-6)
    assert normalized.has_sorted_indices and normalized.dtype == np.float32
