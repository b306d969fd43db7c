"""A~ x of nodes spread over ranks, against the dense matrix by its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from megagraph.attention.convolution import convolve
from megagraph.attention.exchange import Loopback
from megagraph.attention.layout import NodeLayout
from megagraph.attention.neighbours import Neighbours
from megagraph.attention.relation import Relation


def symmetric(num_nodes: int, share: float) -> torch.Tensor:
    """Random weights of some pairs, fp64 [N, N]; nobody knows node 3, and all know node 5, itself among them."""
    generator = torch.Generator().manual_seed(num_nodes)
    weights = torch.rand(num_nodes, num_nodes, generator=generator).double()
    there = torch.rand(num_nodes, num_nodes, generator=generator) < share
    there[5] = True
    there[3] = there[:, 3] = False
    upper = (weights * there).triu()
    return upper + upper.triu(1).T


def neighbours_of(matrix: torch.Tensor) -> Neighbours:
    sparse = matrix.to_sparse_csr()
    relation, weights = Relation.from_csr("a matrix", sparse)
    return Neighbours(relation, weights)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("num_nodes", "share"), [(61, 0.1), (40, 0.0), (24, 1.0)], ids=["some", "hub alone", "all"])
def test_sums_and_gradients_are_those_of_the_dense_matrix(world_size, num_nodes, share):
    matrix, generator = symmetric(num_nodes, share), torch.Generator().manual_seed(1)
    matrix = matrix.float().double()  # as it is kept
    x, weight = (torch.randn(num_nodes, 7, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_()
    whole = neighbours_of(matrix.float())
    cuts = tuple(num_nodes * i // world_size for i in range(world_size + 1))
    layouts = [
        NodeLayout(num_nodes, 3, rank, world_size, cuts if world_size > 1 else None) for rank in range(world_size)
    ]
    exchange = Loopback() if world_size > 1 else None
    for _ in range(2):  # the second time who needs what is known
        parts = [x[first:last] for first, last in pairwise(cuts)]
        out = torch.cat(convolve(exchange, layouts, [whole.shard(layout) for layout in layouts], parts))
        (gradient,) = torch.autograd.grad((out * weight).sum(), x)
        torch.testing.assert_close(out, matrix @ x, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, matrix.T @ weight, rtol=0, atol=1e-12)


def test_sums_are_made_in_fp32():
    matrix = symmetric(40, 1.0).float()
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    (out,) = convolve(None, [NodeLayout(40, 0)], [neighbours_of(matrix)], [x])
    torch.testing.assert_close(out, (matrix.double() @ x.double()).bfloat16(), rtol=1e-2, atol=0)
    assert out.dtype == torch.bfloat16 and (out - (matrix @ x.float()).bfloat16()).abs().max() == 0
