"""Small graphs for the tests of this folder."""

import numpy as np
from hypothesis import strategies as st

from megagraph.data.graph import Graph


def make_graph(num_nodes, edges, num_classes=3, in_features=4):
    """A graph with random features and every class present; ``edges`` are pairs, in any order and number."""
    rng = np.random.default_rng(num_nodes)
    x = rng.standard_normal((num_nodes, in_features))
    y = np.arange(num_nodes) % min(num_classes, num_nodes)
    return Graph.from_arrays("test", x, np.array(edges, np.int64).reshape(-1, 2).T, y)


@st.composite
def random_graphs(draw, max_nodes=14):
    """One node and more, isolated ones, several components, and self loops, repeated edges and both directions."""
    num_nodes = draw(st.integers(1, max_nodes))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=3 * num_nodes))
    return make_graph(num_nodes, [(0, num_nodes - 1), *edges])


def dense_normalized(adjacency):
    """D^-1/2 (A + I) D^-1/2 by its definition, fp64."""
    looped = np.asarray(adjacency.todense(), np.float64) + np.eye(adjacency.shape[0])
    scale = looped.sum(axis=1) ** -0.5
    return scale[:, None] * looped * scale


def dense_hops(adjacency, max_distance):
    """Hop distances by repeated multiplication; max_distance + 1 where further or unreachable."""
    linked = np.asarray(adjacency) != 0
    hops = np.full(linked.shape, max_distance + 1)
    reached = np.eye(len(linked), dtype=bool)
    for hop in range(max_distance + 1):
        hops[reached & (hops > hop)] = hop
        reached = reached | (reached.astype(int) @ linked > 0)
    return hops
