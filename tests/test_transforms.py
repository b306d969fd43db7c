"""Structural biases of small graphs: distances and powers by dense algebra, batches by PyG's own loader."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.utils import to_dense_batch

import megagraph as mg

HOPS, POWERS = 3, 4


def random_graph(n: int) -> Data:
    """With loops, edges given twice, and nodes without any."""
    ends = torch.randint(0, n, (2, n + 2))
    return Data(x=torch.randn(n, 8), edge_index=torch.cat([ends, ends[:, :2], ends[:, :1].expand(2, 1)], dim=1))


def adjacency(graph: Data) -> torch.Tensor:
    dense = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    for a, b in graph.edge_index.T.tolist():
        if a != b:
            dense[a, b] = dense[b, a] = 1
    return dense


@pytest.fixture(scope="module")
def graphs():
    torch.manual_seed(0)
    return [random_graph(n) for n in (1, 5, 12, 7)]


def test_what_is_added_to_a_graph(graphs):
    transform = mg.transforms.StructuralBias(hops=HOPS, powers=POWERS, max_degree=3)
    for graph in graphs:
        added, a = transform(graph), adjacency(graph)
        n = graph.num_nodes
        # a walk of at most d steps leads from i to j
        reached = [torch.linalg.matrix_power(a + torch.eye(n), d) > 0 for d in range(HOPS + 1)]
        expected = HOPS + 1 - torch.stack(reached).sum(0)
        assert added.hop_buckets.dtype == torch.uint8 and torch.equal(added.hop_buckets.view(n, n).long(), expected)
        degrees = a.sum(1)
        step = (a + torch.eye(n)) / ((degrees + 1)[:, None] * (degrees + 1)[None]).sqrt()
        powers = torch.stack([torch.linalg.matrix_power(step, p + 1) for p in range(POWERS)], dim=-1)
        torch.testing.assert_close(added.power_channels.view(n, n, POWERS), powers.float())
        assert torch.equal(added.degrees, degrees.long().clamp(max=3))
        assert not hasattr(graph, "hop_buckets"), "a transform leaves the graph it is given as it is"


def test_attention_over_a_loader_of_pyg_is_that_over_each_graph(graphs):
    transform = mg.transforms.StructuralBias(hops=HOPS, powers=POWERS)
    loader = DataLoader([transform(graph) for graph in graphs], batch_size=len(graphs))
    (batch,) = loader
    x, mask = to_dense_batch(batch.x, batch.batch)
    index = mg.transforms.to_dense_pairs(batch.hop_buckets, batch.batch)
    channels = mg.transforms.to_dense_pairs(batch.power_channels, batch.batch)
    table, weight = torch.randn(2, HOPS + 2), torch.randn(2, POWERS)
    attention = mg.BiasedRingAttention(8, 2)
    for bias in (mg.BucketBias(index, table), mg.ProjectedBias(channels, weight)):
        out = attention(x, bias, key_padding_mask=~mask)
        for b, graph in enumerate(map(transform, graphs)):
            n = graph.num_nodes
            if isinstance(bias, mg.BucketBias):
                own = mg.BucketBias(graph.hop_buckets.view(1, n, n), table)
            else:
                own = mg.ProjectedBias(graph.power_channels.view(1, n, n, -1).movedim(3, 1), weight)
            torch.testing.assert_close(out[b, :n], attention(graph.x[None], own)[0])


def test_a_batch_of_a_fixed_size(graphs):
    pairs = torch.cat([torch.full((g.num_nodes**2,), float(g.num_nodes)) for g in graphs])
    batch = torch.repeat_interleave(torch.arange(4), torch.tensor([g.num_nodes for g in graphs]))
    dense = mg.transforms.to_dense_pairs(pairs, batch, max_num_nodes=15)
    assert dense.shape == (4, 15, 15)
    assert dense.sum(dim=(1, 2)).tolist() == [n**3 for n in (1, 5, 12, 7)]
    masked = mg.transforms.to_dense_pairs(pairs.byte(), batch, max_num_nodes=15)
    assert [int((plane == 255).sum()) for plane in masked] == [15**2 - n**2 for n in (1, 5, 12, 7)]


BAD = {
    "hops": (lambda: mg.transforms.StructuralBias(hops=254), "hops must be 0 to 253, got 254"),
    "powers": (lambda: mg.transforms.StructuralBias(powers=-1), "powers must be 0 to 16, got -1"),
    "nothing": (lambda: mg.transforms.StructuralBias(hops=0), "expected hops, powers or max_degree, all are 0"),
    "several kinds": (lambda: mg.transforms.StructuralBias()(HeteroData()), "expected a torch_geometric.data.Data"),
    "no edges": (lambda: mg.transforms.StructuralBias()(Data(x=torch.zeros(3, 1))), "with edge_index, got Data"),
    "other pairs": (
        lambda: mg.transforms.to_dense_pairs(torch.zeros(6), torch.tensor([0, 0, 1])),
        r"expected the 5 pairs of graphs of \[2, 1\] nodes, got 6",
    ),
    "too large": (
        lambda: mg.transforms.to_dense_pairs(torch.zeros(4), torch.tensor([0, 0]), max_num_nodes=1),
        "max_num_nodes must be at least the 2 nodes of the largest graph, got 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    make, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        make()
