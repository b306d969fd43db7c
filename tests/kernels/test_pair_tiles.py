"""Tiles of listed pairs have every pair once, where its row and column meet."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton has wheels for Linux only")

from megagraph.kernels.pair_tiles import tiles_of
from tests.attention.test_pairs import KINDS, problem
from tests.problems import DEVICE

S, M, N = 2, 37, 83


def tiles(bias, *, by_key=False, buckets=None, size=(16, 32)):
    relation = bias.relation
    if by_key:
        return tiles_of(relation.key_starts, relation.key_rows, relation.key_pairs, M, N, size, buckets)
    return tiles_of(relation.row_starts, relation.columns, None, N, M, size, buckets)


def found(of, own, size):
    """{(sequence, own, other): number} of all numbers that are some pair's."""
    none = 255 if of.numbers.dtype == torch.uint8 else -1
    blocks, numbers = -(-own // size[0]), {}
    for block, (first, last) in enumerate(zip(of.starts[:-1].tolist(), of.starts[1:].tolist(), strict=True)):
        others = of.others[first * size[1] : last * size[1]]
        assert (others.diff() >= 0).all()
        for tile, row, column in (of.numbers[first:last] != none).nonzero().tolist():
            place = block // blocks, block % blocks * size[0] + row, int(others[tile * size[1] + column])
            assert place not in numbers
            numbers[place] = int(of.numbers[first + tile, row, column])
    return numbers


@pytest.mark.parametrize("size", [(16, 32), (16, 16), (32, 64)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_is_in_its_place(kind, size):
    _, given, pairs = problem("bucket", kind, S=S, M=M, N=N)
    places = [tuple(place) for place in pairs.nonzero().tolist()]
    buckets = given.bias.index.tolist()
    by_row, by_key = tiles(given.bias, size=size), tiles(given.bias, by_key=True, size=size)
    assert found(by_row, M, size) == {place: pair for pair, place in enumerate(places)}
    assert found(by_key, N, size) == {(s, column, row): pair for pair, (s, row, column) in enumerate(places)}
    of_buckets = tiles(given.bias, by_key=True, size=size, buckets=given.bias.index)
    expected = {(s, column, row): bucket for (s, row, column), bucket in zip(places, buckets, strict=True)}
    assert found(of_buckets, N, size) == {place: bucket for place, bucket in expected.items() if bucket != 255}


def test_they_are_kept_until_something_changes():
    _, given, _ = problem("bucket", "hub", S=S, M=M, N=N)
    index = given.bias.index
    first = tiles(given.bias, buckets=index)
    again = tiles(given.bias, buckets=index)
    assert again.others is first.others and again.numbers.data_ptr() == first.numbers.data_ptr()
    index.clamp_(max=1)
    changed = tiles(given.bias, buckets=index)
    assert changed.others is first.others and changed.numbers[changed.numbers < 255].max() <= 1
    other = torch.zeros_like(index)
    assert not tiles(given.bias, buckets=other).numbers[changed.numbers < 255].any()
    smaller = tiles(given.bias, size=(16, 16))
    assert tiles(given.bias).others is first.others and tiles(given.bias, size=(16, 16)).others is smaller.others
    given.bias.relation.columns.add_(0)
    assert tiles(given.bias, buckets=index).others is not first.others


def test_tensors_of_inference_are_looked_at_anew():
    _, given, _ = problem("bucket", "hub", S=S, M=M, N=N)
    starts, columns, index = given.bias.relation.row_starts, given.bias.relation.columns, given.bias.index
    with torch.inference_mode():
        copied_columns, copied_index = columns.clone(), index.clone()

        def same():
            of = [
                tiles_of(starts, x, None, N, M, (16, 32), y)
                for x, y in ((columns, index), (copied_columns, copied_index))
            ]
            return torch.equal(of[0].others, of[1].others) and torch.equal(of[0].numbers, of[1].numbers)

        assert same()
        for x in (copied_index, copied_columns):
            x[-1] -= 1
            assert not same()
            x[-1] += 1
            assert same()


def test_a_relation_without_pairs_has_a_tile_that_nobody_visits():
    """A rank's relation may have no pairs."""
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    of = tiles_of(torch.zeros(M + 1, dtype=torch.int64, device=DEVICE), none, None, N, M, (16, 32), None)
    assert not of.starts.any() and of.others.tolist() == [0] * 32
    assert of.numbers.shape[1:] == (16, 32) and (of.numbers == -1).all()
