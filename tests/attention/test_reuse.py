"""Memory of large gradients that the next step takes."""

from __future__ import annotations

import pytest
import torch

import megagraph as mg
from megagraph.attention import reuse

LARGE = (1 << 20) // 4  # numbers of float32


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(reuse, "_free", type(reuse._free)(list))


def test_what_is_held_is_not_taken_and_what_is_freed_is():
    like = torch.empty(LARGE)
    held, freed = reuse.empty_like(like).fill_(1), reuse.empty_like(like).fill_(2)
    assert held.data_ptr() != freed.data_ptr()
    place, part = freed.data_ptr(), freed[3:7]
    del freed
    other = reuse.empty_like(like).fill_(3)  # a view keeps it all
    assert other.data_ptr() != place and part.tolist() == [2.0] * 4
    del part
    again = reuse.empty_like(like)
    assert again.data_ptr() == place and held.unique().tolist() == [1.0]


@pytest.mark.parametrize(("eighths", "shared"), [(9.5, True), (10.0, True), (9.0, False), (10.1, False)])
def test_about_the_same_size_is_enough(eighths, shared):
    first = reuse.empty_like(torch.empty(int(LARGE / 8 * 9.9)))
    place = first.data_ptr()
    del first
    like = torch.empty(int(LARGE / 8 * eighths))
    other = reuse.empty_like(like).zero_()
    assert (other.data_ptr() == place) == shared and other.shape == like.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_like_torch(dtype):
    for like in (torch.empty(2, LARGE, 3, dtype=dtype).transpose(0, 1), torch.empty(5, dtype=dtype)):
        got, want = reuse.empty_like(like), torch.empty_like(like)
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert got.data_ptr() % 64 == 0


def test_only_so_much_is_kept(monkeypatch):
    monkeypatch.setattr(reuse, "_MOST_KEPT", 1 << 22)
    for eighths in range(8, 14):
        results = [reuse.empty_like(torch.empty(LARGE // 8 * eighths)) for _ in range(2)]
        results.clear()
        assert sum(block.nbytes for blocks in reuse._free.values() for block in blocks) <= 1 << 22
    too_large = reuse.empty_like(torch.empty((1 << 22) // 4 + 1))
    del too_large
    assert max(reuse._free) <= 1 << 22


def test_gradients_of_several_steps():
    """A step takes the memory of the gradient before, and none that is still there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 1024, 4) for _ in range(3))
    values = torch.randn(1, 8, 1024, 1024, requires_grad=True)

    def gradient(scale):
        values.grad = None
        mg.biased_attention(scale * q, k, v, values, impl="blocked").sum().backward()
        return values.grad

    first, place = gradient(1.0).clone(), values.grad.data_ptr()
    second = gradient(2.0)
    assert second.data_ptr() == place and not torch.equal(first, second)
    third = gradient(1.0)
    assert third.data_ptr() != second.data_ptr() and torch.equal(first, third)
