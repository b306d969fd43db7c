import numpy as np
import pytest

from megagraph.data.datasets import synthetic_graph
from megagraph.data.options import BatchOptions
from megagraph.data.prepare import prepare
from megagraph.data.start import bias_start

OPTIONS = {
    "ego": dict(sample_nodes=6, samples=3, global_tokens=2, channels=3),
    "cluster": dict(batching="cluster", bias="projected", sequence_nodes=128, super_nodes=6, channels=3),
}


@pytest.fixture(scope="module")
def graph():
    return synthetic_graph(num_nodes=200, average_degree=4, seed=0)


def deviations(builder, num_nodes):
    """Standard deviations of the channels over the pairs of all sequences of the graph, one after the other."""
    batch = builder.build(
        builder.plan(np.arange(num_nodes), num_nodes, None)[0], np.ones(num_nodes, bool), np.random.default_rng(0)
    )
    values = [[] for _ in range(batch.structure.shape[1])]
    for channels in batch.structure.double().numpy():
        for row in range(batch.num_nodes):
            for column in range(batch.num_nodes):
                for value, found in zip(channels[:, row, column], values, strict=True):
                    if row != column and value != 0:
                        found.append(value)
    return np.array([np.std(found) for found in values])


@pytest.mark.parametrize("batching", OPTIONS)
def test_the_unit_of_a_channel_is_its_deviation(graph, batching):
    builder = prepare(graph, BatchOptions(**OPTIONS[batching]))
    unit, start = bias_start(builder)
    assert len(unit) == len(start) == builder.structure.size
    # of the same ego targets other neighbours are drawn, as the generator stands elsewhere
    np.testing.assert_allclose(unit[:3], deviations(builder, 200)[:3], rtol=0.05 if batching == "ego" else 6e-3)
    assert set(unit[3:]) == {1.0}, "indicators are 1 or 0"
    assert (unit, start) == bias_start(prepare(graph, BatchOptions(**OPTIONS[batching])))


def test_powers_start_with_one_deviation_together(graph):
    _, start = bias_start(prepare(graph, BatchOptions(**OPTIONS["ego"])))
    np.testing.assert_allclose(start, [1 / 3, 1 / 3, 1 / 3, 0, 0])


def test_long_sequences_are_looked_at_in_part(monkeypatch):
    """Rows of one cluster of a sequence of 1,024 nodes: about the deviation of all of them."""
    graph = synthetic_graph(num_nodes=1024, average_degree=4, seed=0)
    options = OPTIONS["cluster"] | {"sequence_nodes": 1024}
    whole, _ = bias_start(builder := prepare(graph, BatchOptions(**options)))
    monkeypatch.setattr("megagraph.data.start._ROWS", 1024)
    np.testing.assert_allclose(whole, bias_start(builder)[0], rtol=0.4)


def test_buckets_start_at_their_distance(graph):
    unit, start = bias_start(prepare(graph, BatchOptions(bias="bucket", max_distance=3)))
    assert unit == () and np.array(start).tolist() == 2 * [0, -1, -2, -3, -4] + [0, 0]


def test_buckets_of_full_batches_start_at_their_distance(graph):
    """8 classes of 1 and 2 hops and of what is listed; 4 super nodes weigh e^-d together, the own one and the token
    as one at no distance."""
    changes = dict(batching="full", bias="bucket", hops=2, top=2, super_nodes=4, max_distance=3)
    unit, start = bias_start(prepare(graph, BatchOptions(**changes)))
    assert unit == () and start[:25] == (0.0, *8 * [-1.0], *8 * [-2.0], *8 * [-3.0])
    weights = [0.25 * np.exp(-distance) for distance in (0, 1, 2, 3, 4, 0, 0)]
    np.testing.assert_allclose(np.exp(start[25:]), weights, rtol=1e-3)
