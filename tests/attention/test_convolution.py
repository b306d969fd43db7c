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
    there[5] = there[:, 5] = True
    there[3] = there[:, 3] = False
    upper = (weights * there).triu()
    return upper + upper.triu(1).T


def neighbours_of(matrix: torch.Tensor) -> Neighbours:
    sparse = matrix.to_sparse_csr()
    relation, weights = Relation.from_csr("a matrix", sparse)
    return Neighbours(relation, weights)


ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; bench/gpu.sh --check runs it")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])


@DEVICES
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize(("num_nodes", "share"), [(61, 0.1), (40, 0.0), (24, 1.0)], ids=["some", "hub alone", "all"])
def test_sums_and_gradients_are_those_of_the_dense_matrix(world_size, num_nodes, share, device):
    kept, generator = symmetric(num_nodes, share).float().to(device), torch.Generator().manual_seed(1)
    x, weight = (torch.randn(num_nodes, 7, dtype=torch.float64, generator=generator).to(device) for _ in range(2))
    x.requires_grad_()
    whole, matrix = neighbours_of(kept), kept.double()
    cuts = tuple(num_nodes * i // world_size for i in range(world_size + 1))
    several = world_size > 1
    layouts = [NodeLayout(num_nodes, 3, rank, world_size, cuts if several else None) for rank in range(world_size)]
    parts = [whole.shard(layout) for layout in layouts]
    for _ in range(2):  # the second time it is known who needs what
        inputs = [x[first:last] for first, last in pairwise(cuts)]
        out = torch.cat(convolve(Loopback() if several else None, layouts, parts, inputs))
        (gradient,) = torch.autograd.grad((out * weight).sum(), x)
        torch.testing.assert_close(out, matrix @ x, rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, matrix.T @ weight, rtol=0, atol=1e-12)


def test_training_takes_what_inference_has_found():
    whole, layouts = neighbours_of(symmetric(20, 0.2).float()), [NodeLayout(20, 0, rank, 2) for rank in range(2)]
    inputs = [torch.randn(10, 3, requires_grad=True) for _ in layouts]
    with torch.inference_mode():
        parts = [whole.shard(layout) for layout in layouts]
        want = convolve(Loopback(), layouts, parts, inputs)
    out = convolve(Loopback(), layouts, parts, inputs)
    assert all(map(torch.equal, out, want))
    torch.cat(out).sum().backward()


@DEVICES
def test_sums_are_made_in_fp32(device):
    matrix = symmetric(200, 1.0).float().to(device)
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    with torch.autocast(device, torch.bfloat16):
        (out,) = convolve(None, [NodeLayout(200, 0)], [neighbours_of(matrix)], [x])
    exact = matrix.double() @ x.double()
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-4).all()  # rounded once
