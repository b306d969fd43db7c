"""Rows without padding: there and back, values and gradients."""

from __future__ import annotations

import pytest
import torch

from megagraph.attention.packing import Packing

PADDING = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("heads", [1, 3])
def test_there_and_back(heads):
    packing = Packing(PADDING)
    x = torch.randn(4, 5, heads, 2, dtype=torch.float64)
    rows = x[~PADDING].flatten(1)
    split = packing.split_heads(rows, heads)
    assert split.is_contiguous()
    assert torch.equal(split, x.masked_fill(PADDING[:, :, None, None], 0).transpose(1, 2))
    # what stands in slots of padding is not read
    assert torch.equal(packing.join_heads(x.transpose(1, 2)), rows)


def test_gradients():
    packing = Packing(PADDING)
    for move, shape in (
        (lambda x: packing.split_heads(x, 3), (10, 6)),
        (packing.join_heads, (4, 3, 5, 2)),
        (packing.pack, (4, 5, 6)),
        (packing.unpack, (10, 6)),
    ):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(move, x)
