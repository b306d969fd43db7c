"""Several biases of the same pairs as one, in the most compact form that holds their sum."""

from __future__ import annotations

from functools import reduce
from math import prod

import torch
from torch import Tensor

from megagraph.attention.bias import Bias, BucketBias, DenseBias, ProjectedBias
from megagraph.attention.fields import MASKED_BUCKET, MAX_CHANNELS, check_strided
from megagraph.attention.relation import Relation

Summand = DenseBias | BucketBias | ProjectedBias


def add_biases(first: Summand | Tensor, *others: Summand | Tensor) -> Summand:
    """The sum of biases of the same node pairs; a pair that one of them masks is masked.

    Two tables are one of all pairs of buckets, where these are at most 253, and channels stand side by side up to 16.
    Any other sum is dense, which takes much more memory: as Graphormer's of distances and of edges, whose values
    [B, H, M, N] are dense themselves. What is learned gets its gradient through the sum. A float tensor is dense, as in
    [megagraph.biased_attention][]. Sparse biases of the same pairs are added pair by pair.

    Raises:
        ValueError: they are not of the same pairs and heads, or a bias of other pairs is sparse.

    Example:
        >>> distance = BucketBias(torch.tensor([[[0, 1], [1, 0]]]), torch.tensor([[0.5, -1.0]]))
        >>> edge = DenseBias(torch.tensor([[[[0.0, 2.0], [3.0, 0.0]]]]))
        >>> add_biases(distance, edge).materialize()
        tensor([[[[0.5000, 1.0000],
                  [2.0000, 0.5000]]]])
    """
    return reduce(_sum, [_summand(bias) for bias in (first, *others)])


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """A float tensor of 2 to 4 dimensions, or a sparse one [M, N, H], is a dense bias."""
    if isinstance(bias, Tensor) and bias.layout == torch.sparse_csr:
        return DenseBias(bias)
    if isinstance(bias, Tensor):
        check_strided("bias", bias)
        return DenseBias(bias.reshape((1,) * (4 - bias.ndim) + tuple(bias.shape)))
    return bias


def _summand(bias: Summand | Tensor) -> Summand:
    given = as_bias(bias)
    if not isinstance(given, DenseBias | BucketBias | ProjectedBias):
        raise ValueError(
            "expected biases to add, each a DenseBias, BucketBias or ProjectedBias, or a float tensor, got "
            f"{type(bias).__name__}"
        )
    return given


def _same(a: Relation | None, b: Relation | None) -> bool:
    """Whether both list the same pairs; rows and columns say it all."""
    if a is b or a is None or b is None:
        return a is b
    return (
        a.shape == b.shape
        and a.columns.device == b.columns.device
        and torch.equal(a.row_starts, b.row_starts)
        and torch.equal(a.columns, b.columns)
    )


def _sum(a: Summand, b: Summand) -> Summand:
    if not _same(a.relation, b.relation):
        raise ValueError(
            "biases to add must all be dense, or list the same pairs on the same device; give a sparse one a value, "
            "0 or a bucket of its own, for each pair of the other"
        )
    shapes = [tuple(bias.shape) for bias in (a, b)]
    if any(x != y and 1 not in (x, y) for x, y in zip(*(shape[:2] for shape in shapes), strict=True)) or (
        shapes[0][2:] != shapes[1][2:]
    ):
        raise ValueError(f"biases to add must be of the same [B, H, M, N], got {shapes[0]} and {shapes[1]}")
    sizes = a.learned.shape[1], b.learned.shape[1]  # of tables and projections
    # one bucket is left for indices beyond either table, which must stay beyond it
    if isinstance(a, BucketBias) and isinstance(b, BucketBias) and prod(sizes) < MASKED_BUCKET - 1:
        return _of_tables(a, b)
    if isinstance(a, ProjectedBias) and isinstance(b, ProjectedBias) and sum(sizes) <= MAX_CHANNELS:
        return _of_channels(a, b)
    if a.relation is not None:
        return DenseBias(a.of_pairs() + b.of_pairs(), a.relation)
    return DenseBias(a.materialize() + b.materialize())


def _of_tables(a: BucketBias, b: BucketBias) -> BucketBias:
    number = b.table.shape[1]
    masked = (a.index == MASKED_BUCKET) | (b.index == MASKED_BUCKET)
    beyond = (a.index >= a.table.shape[1]) | (b.index >= number)
    index = (a.index.int() * number + b.index).masked_fill(beyond, MASKED_BUCKET - 1).masked_fill(masked, MASKED_BUCKET)
    table = (a.table[:, :, None] + b.table[:, None, :]).flatten(1)
    return BucketBias(index.to(torch.uint8), table, a.relation)


def _of_channels(a: ProjectedBias, b: ProjectedBias) -> ProjectedBias:
    channels = [a.channels, b.channels]
    if a.relation is None:
        batch = max(x.shape[0] for x in channels)
        channels = [x.expand(batch, -1, -1, -1) for x in channels]
    masks = [x for x in (a.mask, b.mask) if x is not None]
    mask = reduce(torch.logical_or, masks) if masks else None
    return ProjectedBias(torch.cat(channels, dim=1), torch.cat([a.weight, b.weight], dim=1), mask, a.relation)
