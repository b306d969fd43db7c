"""The listed pairs of a relation in tiles, as the kernels of ``pairs`` take them; made once for a relation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from megagraph.kernels.tile import MASKED_BUCKET


@dataclass(frozen=True)
class Tiles:
    """Tiles of pairs, by blocks of rows or, of the transposed relation, of columns.

    Args:
        starts: int32 [S * blocks + 1], the first tile of every block.
        others: int32 [T * BLOCK_N], ascending in a block; the last one again where a block has no more.
        numbers: [T, BLOCK_M, BLOCK_N], uint8, the bucket of each pair, 255 = none; or int32, which pair, -1 = none.
    """

    starts: Tensor
    others: Tensor
    numbers: Tensor


_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of columns, or rows: by size (versions, what was made)
_filled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of places: (data, its version, numbers)


def tiles_of(
    starts: Tensor,
    others: Tensor,
    pairs: Tensor | None,
    num_others: int,
    own: int,
    size: tuple[int, int],
    buckets: Tensor | None,
) -> Tiles:
    """Tiles of the pairs in lists as ``relation.Relation`` has them, kept until the lists change or go.

    Args:
        starts: int64 [S * own + 1], where the list of each begins.
        others: int32 [P], ascending in a list.
        pairs: int32 [P], which pair each is; None: in order.
        num_others: how many there are of those in ``others``.
        own: lists of a sequence.
        size: BLOCK_M, BLOCK_N.
        buckets: uint8 [P] of the pairs, if these are to be the numbers.
    """
    versions, of_size = [*map(_version, (starts, others, pairs))], _made.setdefault(others, {})
    known, made = of_size.get(size, (None, None))
    if made is None or known != versions:
        made = _make(starts, others, num_others, own, *size)
        of_size[size] = (versions, made)
    first_tile, columns, places = made
    of_data, version, numbers = _filled.get(places, (None, -1, None))
    if numbers is None or of_data is not buckets or version != _version(buckets):
        numbers = _numbers(len(columns) * size[0], places, pairs, buckets)
        _filled[places] = (buckets, _version(buckets), numbers)
    return Tiles(first_tile, columns, numbers.view(-1, *size))


def _version(x: Tensor | None) -> object:
    """Equal as long as x is; a tensor of inference has no version, and may change."""
    return -1 if x is None else object() if x.is_inference() else x._version


def _make(
    starts: Tensor, others: Tensor, num_others: int, own: int, block_m: int, block_n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``starts`` and ``others`` of the tiles, and the place of every pair in them, int64 [P]."""
    device, num_lists, blocks = others.device, len(starts) - 1, -(-own // block_m)
    every_list = torch.arange(num_lists, device=device)
    lists = torch.repeat_interleave(every_list, starts.diff(), output_size=len(others))
    within = lists % own
    found, at = torch.unique((lists // own * blocks + within // block_m) * num_others + others, return_inverse=True)
    sizes = torch.bincount(found // num_others, minlength=num_lists // own * blocks)
    first_tile = _starts((sizes + block_n - 1) // block_n)
    slots = torch.arange(len(found), device=device) + (first_tile * block_n - _starts(sizes))[found // num_others]
    if not len(found):  # a tile that nobody visits, since tiles are loaded ahead
        return first_tile.int(), torch.zeros(block_n, dtype=torch.int32, device=device), at
    every = torch.arange(int(first_tile[-1]) * block_n, device=device)
    last = torch.searchsorted(slots, every, right=True) - 1  # the last of a block goes into its slots that are left
    slot = slots[at]
    places = slot // block_n * (block_m * block_n) + within % block_m * block_n + slot % block_n
    return first_tile.int(), (found % num_others)[last].int(), places


def _starts(sizes: Tensor) -> Tensor:
    return nn.functional.pad(sizes.cumsum(0), (1, 0))


def _numbers(count: int, places: Tensor, pairs: Tensor | None, buckets: Tensor | None) -> Tensor:
    if buckets is not None:
        numbers = torch.full((count,), MASKED_BUCKET.value, dtype=torch.uint8, device=places.device)
        numbers[places] = buckets if pairs is None else buckets[pairs.long()]
    else:
        numbers = torch.full((count,), -1, dtype=torch.int32, device=places.device)
        numbers[places] = torch.arange(len(places), dtype=torch.int32, device=places.device) if pairs is None else pairs
    return numbers
