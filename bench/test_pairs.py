"""Attention over listed pairs beside message passing: graphs drawn at random, of the size and degree of real ones.

    pytest bench/test_pairs.py --rows FOLDER

Pairs are each node with itself and with neighbours, most of them near in the order of nodes, as METIS puts them, and
some far; degrees have a long tail. ``bench.sparse_attention`` has real graphs, on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import megagraph as mg
from bench.measure import times
from bench.shapes import DEVICE, DTYPE, NUM_BUCKETS
from bench.sparse_attention import along_edges

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]

HEADS, NEAR, FAR = 8, 24, 0.15  # most neighbours lie within so many places; part of those that lie anywhere
# (nodes, neighbours of each, D): like wordnet30, Computers with thin and wide heads, and an eighth of ogbn-products
SIZES = {
    "cuda": [(117_659, 3, 16), (13_752, 36, 16), (13_752, 36, 64), (306_128, 51, 16)],
    "cpu": [(117_659, 3, 16), (13_752, 36, 16), (13_752, 36, 64)],
}


class Problem(NamedTuple):
    q: Tensor  # [1, H, N, D], as the following
    k: Tensor
    v: Tensor
    d_out: Tensor
    table: Tensor
    bias: mg.BucketBias
    queries: Tensor  # int64 [P]
    keys: Tensor


@functools.lru_cache(maxsize=1)
def problem(nodes: int, degree: int, D: int) -> Problem:
    rng = np.random.default_rng(0)
    degrees = np.minimum((degree * rng.pareto(2.0, nodes)).astype(np.int64), nodes // 4)
    queries = np.repeat(np.arange(nodes), degrees)
    near = queries + rng.integers(-NEAR, NEAR + 1, len(queries))
    keys = np.where(rng.random(len(queries)) < FAR, rng.integers(0, nodes, len(queries)), near.clip(0, nodes - 1))
    pairs = np.unique(np.concatenate([queries * nodes + keys, np.arange(nodes) * (nodes + 1)]))
    queries, keys = torch.from_numpy(pairs // nodes), torch.from_numpy(pairs % nodes)
    starts = torch.searchsorted(queries, torch.arange(nodes + 1))
    torch.manual_seed(0)
    buckets = torch.randint(NUM_BUCKETS, (len(pairs),), dtype=torch.uint8)
    table = torch.randn(HEADS, NUM_BUCKETS, device=DEVICE)
    index = torch.sparse_csr_tensor(starts, keys, buckets, size=(nodes, nodes)).to(DEVICE)
    rows = (torch.randn(1, nodes, HEADS, D, device=DEVICE, dtype=DTYPE).transpose(1, 2) for _ in range(4))
    return Problem(*rows, table, mg.BucketBias(index, table), queries.to(DEVICE), keys.to(DEVICE))


def listed_pairs(given: Problem, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    return mg.biased_attention(q, k, v, replace(given.bias, table=table))


def message_passing(given: Problem, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    bias = table.to(q.dtype).t()[given.bias.index.long()]
    return along_edges(q, k, v, bias, given.queries, given.keys).transpose(0, 1)[None]


CONTENDERS = {"listed_pairs": listed_pairs, "message_passing": message_passing}


def launch_of(
    attend: Callable[..., Tensor], given: Problem, backward: bool, dtype: torch.dtype = DTYPE
) -> Callable[[], list[Tensor]]:
    leaves = [x.detach().to(dtype).requires_grad_(backward) for x in (given.q, given.k, given.v)]
    leaves.append(given.table.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_(backward))
    d_out = given.d_out.to(dtype)

    def launch() -> list[Tensor]:
        out = attend(given, *leaves)
        return [out.detach(), *(torch.autograd.grad(out, leaves, d_out) if backward else ())]

    return launch


def by_head(given: Problem, dtype: torch.dtype) -> list[Tensor]:
    """Message passing of a head at a time, or numbers of all pairs of a large graph would not fit beside each other."""
    parts = []
    for h in range(HEADS):
        one = (x[:, h : h + 1] for x in (given.q, given.k, given.v, given.d_out))
        of_head = Problem(*one, given.table[h : h + 1], given.bias, given.queries, given.keys)
        parts.append(launch_of(message_passing, of_head, True, dtype)())
    return [torch.cat(of_heads, dim=0 if of_heads[0].ndim == 2 else 1) for of_heads in zip(*parts, strict=True)]


def check(got: list[Tensor], given: Problem) -> None:
    """Within twice what message passing in the same dtype is off."""
    want, plain = by_head(given, torch.float64), by_head(given, DTYPE)
    for name, x, exact, near in zip(("out", "dq", "dk", "dv", "d_table"), got, want, plain, strict=True):
        error, budget = ((y.double() - exact).abs().max().item() for y in (x, near))
        budget = 2 * (budget + torch.finfo(DTYPE).eps * exact.abs().max().item())
        assert error <= budget, f"wrong values: {name} is {error:.1e} off, allowed are {budget:.1e}"


def pytest_generate_tests(metafunc):
    sizes = [(500, 5, 8)] if metafunc.config.getoption("--smoke") else SIZES[DEVICE]
    metafunc.parametrize("size", sizes, ids=lambda size: "N{}-degree{}-D{}".format(*size))
    metafunc.parametrize("direction", ["forward", "forward_backward"])
    metafunc.parametrize("contender", CONTENDERS)


def test_pairs(size, direction, contender, pedantic, record, request):
    given = problem(*size)
    attend = CONTENDERS[contender]
    if contender == "listed_pairs":
        check(launch_of(attend, given, True)(), given)
    row = {"series": "pairs", "contender": contender, "direction": direction, "unit": "s", "form": "bucket"}
    row |= {
        "B": 1,
        "M": size[0],
        "N": size[0],
        "pairs": len(given.keys),
        "H": HEADS,
        "D": size[2],
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    row |= times([launch_of(attend, given, direction == "forward_backward")], pedantic)
    record(row)
    request.getfixturevalue("benchmark").extra_info.update(row)
